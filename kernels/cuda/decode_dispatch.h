// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/cuda/decode_params.h"
#include "kernels/tile.h"

// Which compiled attention kernel serves a shape.
namespace crumb::kernels::cuda {

using DecodeLauncher = cudaError_t (*)(const DecodeKernelParams&, cudaStream_t);

// Null where there is none. bulk: the kernel that loads by bulk copies (Hopper and newer).
DecodeLauncher FindDecodeKernel(const TileShape& tile, int columns, bool bulk);

}  // namespace crumb::kernels::cuda
