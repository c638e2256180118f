// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/decode/planned_kernel.cuh"

namespace crumb::kernels::cuda {

DecodeLauncher FindDim128Groups(int group_size, int query_rows, bool bulk) {
  return group_size == 64 ? NarrowInstance<128, 2>(query_rows, bulk)
                          : NarrowInstance<128, 4>(query_rows, bulk);
}

}  // namespace crumb::kernels::cuda
