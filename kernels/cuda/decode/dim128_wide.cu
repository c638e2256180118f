// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/decode/instance.cuh"

namespace crumb::kernels::cuda {

DecodeLauncher FindDim128Wide(int columns, bool bulk) {
  if (columns <= 12) return Instance<128, 1, 2, true>(bulk);
  if (columns <= 16) return Instance<128, 1, 2, false>(bulk);
  return nullptr;
}

}  // namespace crumb::kernels::cuda
