// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

#include "kernels/cuda/evict/evict.h"
#include "kernels/cuda/pages/paged_kv_call.h"

// Conversion between page tiles and an engine's own paged KV cache, for all layers in one call
// (docs/kernels/paged_kv.md). All pointers are device pointers.
namespace crumb::kernels::cuda {

// Returns whether the kernel supports this tile. It needs pages of 64 tokens.
bool DequantizeSupported(const TileShape& tile);

// Writes the rows of pages into the cache. Enqueues one kernel. Allocates nothing, does not
// synchronise and can be captured into a graph. Its output is deterministic. Returns
// cudaErrorInvalidValue if the sizes are not supported.
cudaError_t DequantizePages(const DequantizeParams& params, cudaStream_t stream);

// DequantizePages of BF16 tiles, which copies their rows.
cudaError_t ScatterPages(const DequantizeParams& params, cudaStream_t stream);

size_t QuantizeFromWorkspaceBytes(const EvictParams& evict);

// Quantizes whole pages of an engine's rows into page tiles: one kernel gathers the rows, then
// EvictWindows quantizes them, so the bytes are those that evict produces. Enqueues two kernels.
// Allocates nothing, does not synchronise and can be captured into a graph. Returns
// cudaErrorInvalidValue if the sizes are not supported.
cudaError_t QuantizeFromPages(const QuantizeFromParams& params, cudaStream_t stream);

}  // namespace crumb::kernels::cuda
