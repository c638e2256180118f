// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "kernels/cuda/common/attention_inputs.h"
#include "kernels/tile.h"

// Arguments of PrefillAttention (prefill_attention.h). This header is plain data and needs no CUDA
// header. All pointers are device pointers.
namespace crumb::kernels::cuda {

// Lengths of each sequence. A sequence without fresh tokens is padding: none of its memory is read
// or written.
struct PrefillLengths {
  const int32_t* sink_tokens = nullptr;    // [batch]
  const int32_t* pages = nullptr;          // [batch] INT2 history pages
  const int32_t* recent_tokens = nullptr;  // [batch] older BF16 tokens behind the history
  const int32_t* recent_begin = nullptr;   // [batch] ring slot of the oldest recent token
  const int32_t* fresh_tokens = nullptr;   // [batch] at most fresh_max
  // [batch] index of the first fresh token in q and out, and in k and v unless there is fresh_row
  const int32_t* fresh_begin = nullptr;
  const int32_t* bf16_pages = nullptr;  // [batch] as in DecodeLengths; null: none
  // [batch] index of the first fresh token in k and v; null: fresh_begin
  const int32_t* fresh_row = nullptr;
};

// Sizes that determine the grid. A captured graph serves every batch within them.
struct PrefillShape {
  TileShape tile;
  int batch = 1;      // sequences, padding included
  int max_pages = 1;  // entries of page_address per sequence
  int fresh_max = 1;  // bound on the fresh tokens of a sequence
  int kv_heads = 1;
  int q_heads = 1;  // a multiple of kv_heads; query head h reads KV head h / (q_heads / kv_heads)
};

struct PrefillAttentionParams : AttentionInputs {
  PrefillShape shape;
  PrefillLengths lengths;

  // The fresh bf16 row of (token, KV head) begins token * token_stride + head * head_stride
  // elements into k and v. Strides are multiples of 8.
  const void* k = nullptr;
  const void* v = nullptr;
  int64_t token_stride = 0;
  int64_t head_stride = 0;
};

}  // namespace crumb::kernels::cuda
