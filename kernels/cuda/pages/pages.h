// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

#include "kernels/cuda/evict/evict.h"
#include "kernels/cuda/pages/append_call.h"
#include "kernels/cuda/pages/fetch_call.h"
#include "kernels/cuda/pages/paged_kv_call.h"
#include "kernels/cuda/pages/query_offsets_call.h"

// Kernels that write rows and move page tiles; none computes attention. All pointers are device
// pointers. Each function enqueues one kernel unless it says otherwise, allocates nothing, does not
// synchronise and can be captured into a graph. It returns cudaErrorInvalidValue if the sizes are
// not supported.
namespace crumb::kernels::cuda {

// Writes new K and V rows of one layer into a sequence's sink or recent ring. It serves engines
// whose rows are finished before they are written; an engine with a kernel of its own for QK norm
// and RoPE can write the rows there (models/cuda/layer_kernels.h).
cudaError_t AppendRows(const AppendParams& params, cudaStream_t stream);

// Computes q . mu_k of every query row. Keys are stored without their mean mu_k; decode and prefill
// attention add this term back to the logits (AttentionInputs::offset).
cudaError_t QueryOffsets(const QueryOffsetsParams& params, cudaStream_t stream);

// Copies page tiles from scattered places of pinned host memory, or of a peer's memory, into slots
// and verifies their CRC-32C in registers on the way; or verifies tiles where they lie
// (docs/kernels/fetch.md). Tiles whose checksum differs are stored all the same and reported in
// params.status.
cudaError_t FetchTiles(const FetchParams& params, cudaStream_t stream);

// Returns whether DequantizePages supports this tile. It needs pages of 64 tokens.
bool DequantizeSupported(const TileShape& tile);

// Writes the rows of pages into an engine's own paged KV cache, for all layers in one call
// (docs/kernels/paged_kv.md). Its output is deterministic.
cudaError_t DequantizePages(const DequantizeParams& params, cudaStream_t stream);

// DequantizePages of BF16 tiles, which copies their rows.
cudaError_t ScatterPages(const DequantizeParams& params, cudaStream_t stream);

size_t QuantizeFromWorkspaceBytes(const EvictParams& evict);

// Quantizes whole pages of an engine's rows into page tiles with two kernels: one gathers the rows,
// then EvictWindows quantizes them, so the bytes are those that evict produces.
cudaError_t QuantizeFromPages(const QuantizeFromParams& params, cudaStream_t stream);

}  // namespace crumb::kernels::cuda
