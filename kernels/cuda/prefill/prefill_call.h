// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "kernels/cuda/decode/decode_call.h"
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

// kWarp: products of one warp although the device has those of four, as FP16 takes always.
enum class PrefillProducts : uint8_t { kAuto, kWarp };

struct PrefillAttentionParams {
  PrefillShape shape;
  PrefillLengths lengths;

  const void* q = nullptr;            // [tokens, q_heads, head_dim] of row_type
  void* out = nullptr;                // [tokens, q_heads, head_dim] of out_type
  RowType row_type = RowType::kBf16;  // of q, k, v, sink, recent window and BF16 pages
  OutType out_type = OutType::kBf16;
  float* lse = nullptr;  // [tokens, q_heads] natural log of the softmax sum, or null
  // Fresh rows: token * token_stride + head * head_stride elements in; multiples of 8.
  const void* k = nullptr;
  const void* v = nullptr;
  int64_t token_stride = 0;
  int64_t head_stride = 0;

  // Tile of (sequence, page, KV head): page_address[sequence, page] + page_layer_offset
  // + head * page_head_stride. Bytes; tiles are 128-byte aligned. BF16 pages as in
  // DecodeAttentionParams.
  const uint64_t* page_address = nullptr;  // [batch, max_pages]
  int64_t page_layer_offset = 0;
  int64_t page_head_stride = 0;
  Bf16Rows sink;
  Bf16Rows recent;
  int recent_capacity = 1;  // slots of the ring

  const float* rotation_k = nullptr;  // [kv_heads, head_dim, head_dim] R_K, or null: identity
  const float* rotation_v = nullptr;  // [kv_heads, head_dim, head_dim] R_V, or null: identity
  const float* mean_v = nullptr;      // [kv_heads, head_dim] mu_v R_V, or null: zero
  // q . mu_k, or null: [tokens, q_heads, position_blocks]. Page p uses block
  // min(p / pages_per_position_block, position_blocks - 1).
  const float* offset = nullptr;
  int position_blocks = 1;
  int pages_per_position_block = 1;
  const float* shift = nullptr;       // [q_heads] subtracted from INT2 logits, nats, or null
  const float* sink_logit = nullptr;  // [q_heads] learned logit in the softmax sum, or null

  float scale = 0.0f;     // 0: 1 / sqrt(head_dim)
  float soft_cap = 0.0f;  // > 0: cap * tanh(logit / cap)
  int window = 0;         // > 0: attend the last `window` positions only
  PrefillProducts products = PrefillProducts::kAuto;

  void* workspace = nullptr;  // PrefillWorkspaceBytes(shape)
};

}  // namespace crumb::kernels::cuda
