// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "kernels/cuda/common/attention_inputs.h"
#include "kernels/tile.h"

// What a call of DecodeAttention is given (decode_attention.h). Plain data that needs no CUDA
// header. All pointers are device pointers.
namespace crumb::kernels::cuda {

// Where each sequence's tokens are at this step. A sequence with all lengths 0 is padding:
// nothing of it is read and nothing written. The fresh query tokens are the sequence's newest ones:
// recent_tokens >= q_tokens, unless the sequence has no more than its sink.
struct DecodeLengths {
  const int32_t* sink_tokens = nullptr;    // [batch]
  const int32_t* pages = nullptr;          // [batch] history pages
  const int32_t* recent_tokens = nullptr;  // [batch]
  const int32_t* recent_begin = nullptr;   // [batch] ring slot of the oldest recent token
  // [batch] history pages behind `pages` that are BF16, which lie as the sink does; null: none. Of
  // these page j has column pages + j of page_address.
  const int32_t* bf16_pages = nullptr;
};

// Sizes that fix the grid and the workspace; a captured graph serves every batch within them.
struct DecodeShape {
  TileShape tile;
  int batch = 1;      // sequences, padding included
  int max_pages = 1;  // columns of page_address
  int q_tokens = 1;   // query tokens per sequence
  int kv_heads = 1;
  int q_heads = 1;  // a multiple of kv_heads; query head h reads KV head h / (q_heads / kv_heads)
  int window_tokens_max = 384;  // most tokens in sink and recent window of one sequence
  // True: how a sequence is cut into splits depends on its own lengths alone, so that its output
  // does not depend on what else is in the batch. Costs balance.
  bool batch_invariant = false;

  // Columns of the score matrix of one KV head.
  int columns() const { return q_tokens * (q_heads / kv_heads); }
};

struct DecodeAttentionParams : AttentionInputs {
  DecodeShape shape;
  DecodeLengths lengths;

  // The kernel before this one in the stream wrote neither tiles nor lengths nor plan (it may write
  // q, offsets and rows of the windows), nor did one that it did not wait for: its end then
  // overlaps this one's start.
  bool overlap_previous = false;

  const void* plan = nullptr;  // DecodePlanBytes(shape), after PlanDecode
  void* workspace = nullptr;   // DecodeWorkspaceBytes(shape), zeroed once when allocated
};

}  // namespace crumb::kernels::cuda
