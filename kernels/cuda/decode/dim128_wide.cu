// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/decode/planned_kernel.cuh"

namespace crumb::kernels::cuda {

DecodeLauncher FindDim128Wide(int query_rows, bool bulk) {
  if (query_rows <= 12) return Instance<128, 1, 2, true>(bulk);
  if (query_rows <= 16) return Instance<128, 1, 2, false>(bulk);
  return nullptr;
}

}  // namespace crumb::kernels::cuda
