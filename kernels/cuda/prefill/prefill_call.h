// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "kernels/cuda/common/attention_inputs.h"
#include "kernels/tile.h"

// What a call of PrefillAttention is given (prefill_attention.h). Plain data that needs no CUDA
// header. All pointers are device pointers.
namespace crumb::kernels::cuda {

// Where each sequence's tokens are. A sequence without fresh tokens is padding: nothing of it is
// read and nothing written.
struct PrefillLengths {
  const int32_t* sink_tokens = nullptr;    // [batch]
  const int32_t* pages = nullptr;          // [batch] history pages
  const int32_t* recent_tokens = nullptr;  // [batch] older BF16 tokens behind the history
  const int32_t* recent_begin = nullptr;   // [batch] ring slot of the oldest recent token
  const int32_t* fresh_tokens = nullptr;   // [batch] at most fresh_max
  const int32_t* fresh_begin = nullptr;    // [batch] row of the first fresh token in q, k, v, out
  const int32_t* bf16_pages = nullptr;     // [batch] as DecodeLengths; null: none
};

// Sizes that fix the grid; a captured graph serves every batch within them.
struct PrefillShape {
  TileShape tile;
  int batch = 1;      // sequences, padding included
  int max_pages = 1;  // columns of page_address
  int fresh_max = 1;  // most fresh tokens of a sequence
  int kv_heads = 1;
  int q_heads = 1;  // a multiple of kv_heads; query head h reads KV head h / (q_heads / kv_heads)
};

struct PrefillAttentionParams : AttentionInputs {
  PrefillShape shape;
  PrefillLengths lengths;

  // Fresh rows: token * token_stride + head * head_stride elements in; multiples of 8.
  const void* k = nullptr;
  const void* v = nullptr;
  int64_t token_stride = 0;
  int64_t head_stride = 0;
};

}  // namespace crumb::kernels::cuda
