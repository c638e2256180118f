// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "kernels/cuda/common/attention_inputs.h"
#include "kernels/tile.h"

// Arguments of DecodeAttention (decode_attention.h). This header is plain data and needs no CUDA
// header. All pointers are device pointers.
namespace crumb::kernels::cuda {

// Lengths of each sequence at this step. A sequence whose lengths are all 0 is padding: none of its
// memory is read or written. The query tokens are the sequence's newest tokens: REQUIRES
// recent_tokens >= q_tokens, unless the sequence has no more than its sink.
struct DecodeLengths {
  const int32_t* sink_tokens = nullptr;    // [batch]
  const int32_t* pages = nullptr;          // [batch] INT2 history pages
  const int32_t* recent_tokens = nullptr;  // [batch]
  const int32_t* recent_begin = nullptr;   // [batch] ring slot of the oldest recent token
  // [batch] BF16 history pages, which follow the INT2 ones and are laid out as the sink is; null:
  // none. BF16 page j is entry pages + j of the sequence's page_address.
  const int32_t* bf16_pages = nullptr;
};

// Sizes that determine the grid and the workspace. A captured graph serves every batch within them.
struct DecodeShape {
  TileShape tile;
  int batch = 1;      // sequences, padding included
  int max_pages = 1;  // entries of page_address per sequence
  int q_tokens = 1;   // query tokens per sequence
  int kv_heads = 1;
  int q_heads = 1;  // a multiple of kv_heads; query head h reads KV head h / (q_heads / kv_heads)
  int window_tokens_max = 384;  // bound on the tokens in sink and recent window of one sequence
  // True: how a sequence is cut into splits depends on its own lengths alone, so that its output
  // does not depend on the rest of the batch, at the price of less balanced work.
  bool batch_invariant = false;

  // Query rows of one KV head: the N dimension of its MMAs.
  int query_rows() const { return q_tokens * (q_heads / kv_heads); }
};

struct DecodeAttentionParams : AttentionInputs {
  DecodeShape shape;
  DecodeLengths lengths;

  // Lets this kernel start while the previous kernel of the stream still runs. REQUIRES: the
  // previous kernel, and kernels that it did not wait for, wrote neither tiles nor lengths nor
  // plan; they may write q, offsets and rows of the windows.
  bool overlap_previous = false;

  const void* plan = nullptr;  // DecodePlanBytes(shape), written by PlanDecode
  void* workspace = nullptr;   // DecodeWorkspaceBytes(shape), zeroed once when allocated
};

}  // namespace crumb::kernels::cuda
