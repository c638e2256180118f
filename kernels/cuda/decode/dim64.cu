// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/decode/instance.cuh"

namespace crumb::kernels::cuda {

DecodeLauncher FindDim64(int group_size, int columns, bool bulk) {
  return group_size == 64 ? NarrowInstance<64, 1>(columns, bulk)
                          : NarrowInstance<64, 2>(columns, bulk);
}

}  // namespace crumb::kernels::cuda
