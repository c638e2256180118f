// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/decode/planned_kernel.cuh"

namespace crumb::kernels::cuda {

DecodeLauncher FindDim256Groups(int group_size, int query_rows, bool bulk) {
  return group_size == 64 ? NarrowInstance<256, 4>(query_rows, bulk)
                          : NarrowInstance<256, 8>(query_rows, bulk);
}

}  // namespace crumb::kernels::cuda
