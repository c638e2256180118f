// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

#include "kernels/cuda/evict/constants.h"
#include "kernels/cuda/evict/evict_call.h"
#include "kernels/cuda/evict/evict_tuning.h"
#include "kernels/tile.h"

// Evicted windows: the 64 oldest rows of recent rings -> page tiles, on the GPU, for all layers and
// sequences of a step in one launch; INT2 ones, or BF16 ones where 2 bits are given up. Same
// definition as QuantizeTile in kernels/quantize.h. All pointers are device pointers.
namespace crumb::kernels::cuda {

// Whether the kernel serves this tile: 64 tokens.
bool EvictSupported(const TileShape& tile);

// What `sums` asks for: 256-byte aligned.
size_t EvictWorkspaceBytes(int windows_max, int layers, int kv_heads);

// Enqueues one kernel: no allocation, no synchronisation, can be captured. Deterministic.
// cudaErrorInvalidValue: tile not supported, or sums without a workspace.
// cudaErrorInvalidConfiguration: the device, or the limits, have too little shared memory for the
// method's constants.
cudaError_t EvictWindows(const EvictParams& params, cudaStream_t stream,
                         const EvictTuning& tuning = {});

}  // namespace crumb::kernels::cuda
