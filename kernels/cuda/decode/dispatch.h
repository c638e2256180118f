// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/cuda/decode/kernel_params.h"
#include "kernels/tile.h"

// Which compiled attention kernel serves a shape. The kernels are compiled in several files.
namespace crumb::kernels::cuda {

using DecodeLauncher = cudaError_t (*)(const DecodeKernelParams&, cudaStream_t);

// Null where there is none. bulk: the kernel that loads by bulk copies (Hopper and newer).
DecodeLauncher FindDecodeKernel(const TileShape& tile, int columns, bool bulk);

// By head_dim and, where it says so, for other groups or more columns than the others.
DecodeLauncher FindDim64(int group_size, int columns, bool bulk);
DecodeLauncher FindDim128(int columns, bool bulk);
DecodeLauncher FindDim128Wide(int columns, bool bulk);
DecodeLauncher FindDim128Groups(int group_size, int columns, bool bulk);
DecodeLauncher FindDim256(int columns, bool bulk);
DecodeLauncher FindDim256Groups(int group_size, int columns, bool bulk);

}  // namespace crumb::kernels::cuda
