// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/decode/instance.cuh"

namespace crumb::kernels::cuda {

DecodeLauncher FindDim256(int columns, bool bulk) { return NarrowInstance<256, 2>(columns, bulk); }

}  // namespace crumb::kernels::cuda
