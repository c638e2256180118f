// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

#include "kernels/cuda/evict/constants.h"
#include "kernels/cuda/evict/evict_call.h"
#include "kernels/cuda/evict/evict_tuning.h"
#include "kernels/tile.h"

// Evicts windows on the GPU: the 64 oldest rows of recent rings become page tiles, for all layers
// and sequences of a step in one launch. Tiles are INT2, or BF16 for keyspaces whose quality does
// not allow 2 bits. The definition is that of QuantizeTile in kernels/quantize.h;
// docs/kernels/evict.md describes the schedule. All pointers are device pointers.
namespace crumb::kernels::cuda {

// Returns whether the kernel supports this tile. It needs pages of 64 tokens.
bool EvictSupported(const TileShape& tile);

// Bytes of the workspace that checksums need; 256-byte aligned.
size_t EvictWorkspaceBytes(int windows_max, int layers, int kv_heads);

// Enqueues one kernel. Allocates nothing, does not synchronise and can be captured into a graph.
// Its output is deterministic. Returns cudaErrorInvalidValue if the tile is not supported or
// checksums have no workspace, and cudaErrorInvalidConfiguration if the device or tuning.limits
// have too little shared memory for the method's constants.
cudaError_t EvictWindows(const EvictParams& params, cudaStream_t stream,
                         const EvictTuning& tuning = {});

}  // namespace crumb::kernels::cuda
