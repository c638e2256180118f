// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/tile.h"

// Attention of one layer over the three segments of a sequence: the BF16 sink page, history pages
// as they are stored, and the BF16 recent window. This is the CPU back end; the double-precision
// reference is in kernels/reference/.
namespace crumb::kernels {

// One sequence, one layer, all KV heads. Positions are counted from the sequence's first token: the
// sink has [0, sink_tokens), the history [sink_tokens, sink_tokens + 64 * pages), and the recent
// window follows. Query token i has position total - q_tokens + i, where total is the sum of all
// three lengths, and attends positions up to its own; K and V of the fresh tokens are already in
// the recent window.
//
// BF16 rows are in the model's basis, INT2 tiles are centred and rotated (docs/architecture.md,
// "Basis"). The logit of a BF16 row is softcap(q.k * scale), that of an INT2 row softcap((q'.z +
// offset) * scale) - shift, with q' = q R_K.
struct AttentionParams {
  TileShape shape;
  PageFormat history_format = PageFormat::kInt2;
  int q_tokens = 1;
  int kv_heads = 1;
  int q_heads = 1;  // a multiple of kv_heads; query head h reads KV head h / (q_heads / kv_heads)

  const Bf16* q = nullptr;  // [q_tokens, q_heads, head_dim]
  float* out = nullptr;     // [q_tokens, q_heads, head_dim], model's basis
  float* lse = nullptr;     // [q_tokens, q_heads] natural log of the softmax sum, or null

  int sink_tokens = 0;
  const Bf16* sink_k = nullptr;  // [sink_tokens, head_dim] per KV head, bf16_head_stride as below
  const Bf16* sink_v = nullptr;
  int64_t sink_head_stride = 0;   // elements between KV heads
  int64_t sink_token_stride = 0;  // elements between tokens

  int pages = 0;
  const uint64_t* page_address = nullptr;  // [pages] address of this layer's first tile
  int64_t page_head_stride = 0;            // bytes between the tiles of two KV heads

  int recent_tokens = 0;
  int recent_begin = 0;     // ring slot of the oldest recent token
  int recent_capacity = 0;  // slots in the ring; token j lies in slot (begin + j) % capacity
  const Bf16* recent_k = nullptr;
  const Bf16* recent_v = nullptr;
  int64_t recent_head_stride = 0;   // elements between KV heads
  int64_t recent_token_stride = 0;  // elements between slots

  const float* rotation_k = nullptr;  // [kv_heads, head_dim, head_dim] R_K, or null: identity
  const float* rotation_v = nullptr;  // [kv_heads, head_dim, head_dim] R_V, or null: identity
  const float* mean_v = nullptr;      // [kv_heads, head_dim] mu_v R_V, or null: zero
  const float* offset = nullptr;      // [q_tokens, q_heads, position_blocks] q . mu_k, or null
  int position_blocks = 0;            // position blocks of `offset`
  // history page p uses position block min(p / this, position_blocks - 1)
  int pages_per_position_block = 1;
  const float* shift = nullptr;  // [q_heads] INT2 mass shift in nats, or null

  float scale = 0.0f;     // factor of the logits; 0: 1 / sqrt(head_dim)
  float soft_cap = 0.0f;  // > 0: logits become cap * tanh(logit / cap)
  int window = 0;         // > 0: sliding window, a token attends the last `window` positions only
  const float* sink_logit = nullptr;  // [q_heads] learned logit added to the softmax sum, or null
};

// Bytes of scratch memory that Attend needs for these sizes. Its contents need not be kept between
// calls.
size_t AttentionWorkspaceBytes(const AttentionParams& params);

// Computes one layer of one sequence for KV heads [kv_head_begin, kv_head_end) on the calling
// thread, so that callers can divide the heads between threads. REQUIRES: `workspace` is 64-byte
// aligned.
void Attend(const AttentionParams& params, int kv_head_begin, int kv_head_end, void* workspace);

}  // namespace crumb::kernels
