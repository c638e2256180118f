// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/decode/instance.cuh"

namespace crumb::kernels::cuda {

DecodeLauncher FindDim256Groups(int group_size, int columns, bool bulk) {
  return group_size == 64 ? NarrowInstance<256, 4>(columns, bulk)
                          : NarrowInstance<256, 8>(columns, bulk);
}

}  // namespace crumb::kernels::cuda
