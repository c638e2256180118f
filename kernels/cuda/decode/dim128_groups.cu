// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/decode/instance.cuh"

namespace crumb::kernels::cuda {

DecodeLauncher FindDim128Groups(int group_size, int columns, bool bulk) {
  return group_size == 64 ? NarrowInstance<128, 2>(columns, bulk)
                          : NarrowInstance<128, 4>(columns, bulk);
}

}  // namespace crumb::kernels::cuda
