// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

// Inputs and outputs that decode and prefill attention have in common. This header is plain data
// and needs no CUDA header. All pointers are device pointers.
namespace crumb::kernels::cuda {

// The BF16 rows of every sequence in its sink or in its recent ring. The K row of (sequence, KV
// head, slot) begins at address[sequence] + layer_offset + head * head_stride + slot *
// token_stride, and its V row v_offset further. Offsets and strides are in bytes and are multiples
// of 16.
struct Bf16Rows {
  const uint64_t* address = nullptr;  // [batch]
  int64_t layer_offset = 0;
  int64_t head_stride = 0;
  int64_t token_stride = 0;
  int64_t v_offset = 0;
};

enum class OutType : uint8_t { kBf16, kF32 };

// Attention of one layer for a batch of sequences. A query token attends the BF16 sink, the history
// pages and the newer BF16 rows of its sequence, as kernels/attention.h defines it.
//
// In the shapes below `rows` stands for the query tokens: [batch, q_tokens] in decode, [tokens] in
// prefill.
struct AttentionInputs {
  const void* q = nullptr;  // [rows, q_heads, head_dim] bf16
  void* out = nullptr;      // [rows, q_heads, head_dim] of out_type
  OutType out_type = OutType::kBf16;
  float* lse = nullptr;  // [rows, q_heads] natural log of the softmax sum, or null

  // The tile of (sequence, page, KV head) begins at page_address[sequence, page] +
  // page_layer_offset + head * page_head_stride, in bytes. INT2 tiles are 128-byte aligned. The
  // rows of a BF16 page are laid out as the sink's: the offset and strides of `sink` apply to the
  // page's address.
  const uint64_t* page_address = nullptr;  // [batch, max_pages]
  int64_t page_layer_offset = 0;
  int64_t page_head_stride = 0;
  Bf16Rows sink;
  Bf16Rows recent;
  int recent_capacity = 1;  // slots of a sequence's recent ring

  const float* rotation_k = nullptr;  // [kv_heads, head_dim, head_dim] R_K, or null: identity
  const float* rotation_v = nullptr;  // [kv_heads, head_dim, head_dim] R_V, or null: identity
  const float* mean_v = nullptr;      // [kv_heads, head_dim] mu_v R_V, or null: zero
  // [rows, q_heads, position_blocks] q . mu_k, or null: zero. Page p uses position block min(p /
  // pages_per_position_block, position_blocks - 1).
  const float* offset = nullptr;
  int position_blocks = 1;
  int pages_per_position_block = 1;
  const float* shift = nullptr;       // [q_heads] subtracted from INT2 logits, nats, or null
  const float* sink_logit = nullptr;  // [q_heads] learned logit in the softmax sum, or null

  float scale = 0.0f;     // factor of the logits; 0: 1 / sqrt(head_dim)
  float soft_cap = 0.0f;  // > 0: logits become cap * tanh(logit / cap)
  int window = 0;         // > 0: sliding window, a token attends the last `window` positions only
};

}  // namespace crumb::kernels::cuda
