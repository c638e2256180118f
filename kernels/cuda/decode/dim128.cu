// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/decode/instance.cuh"

namespace crumb::kernels::cuda {

DecodeLauncher FindDim128(int columns, bool bulk) { return NarrowInstance<128, 1>(columns, bulk); }

}  // namespace crumb::kernels::cuda
