// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/decode/planned_kernel.cuh"

namespace crumb::kernels::cuda {

DecodeLauncher FindDim128(int query_rows, bool bulk) {
  return NarrowInstance<128, 1>(query_rows, bulk);
}

}  // namespace crumb::kernels::cuda
