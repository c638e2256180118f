// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "kernels/cuda/common/row_type.h"
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

// BF16 (or FP16) rows of every sequence. Row of (sequence, KV head, slot): address[sequence] +
// layer_offset + head * head_stride + slot * token_stride; its V row lies v_offset further. Bytes,
// all multiples of 16.
struct Bf16Rows {
  const uint64_t* address = nullptr;  // [batch]
  int64_t layer_offset = 0;
  int64_t head_stride = 0;
  int64_t token_stride = 0;
  int64_t v_offset = 0;
};

// How the work is cut. kPlanned: equal pieces of the bytes, one for each multiprocessor. kClusters:
// thread block clusters of Hopper, the same ones for each sequence and KV head; head_dim and groups
// of 128, up to 16 columns. kAuto: clusters where they serve the shape, for at most two sequences;
// with more, while all pairs have one at once, as lengths ask for. Never if batch_invariant.
enum class DecodeForm : uint8_t { kAuto, kPlanned, kClusters };

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
  DecodeForm form = DecodeForm::kAuto;

  // Columns of the score matrix of one KV head.
  int columns() const { return q_tokens * (q_heads / kv_heads); }
};

enum class OutType : uint8_t { kBf16, kF32, kFp16 };

// Which instructions bring tiles to shared memory. kAuto takes bulk copies where there are any;
// kAsync16 is for DecodeForm::kPlanned only.
enum class CopyPath : uint8_t { kAuto, kAsync16 };

struct DecodeAttentionParams {
  DecodeShape shape;
  DecodeLengths lengths;

  const void* q = nullptr;            // [batch, q_tokens, q_heads, head_dim] of row_type
  void* out = nullptr;                // [batch, q_tokens, q_heads, head_dim] of out_type
  RowType row_type = RowType::kBf16;  // of q, sink and recent window
  OutType out_type = OutType::kBf16;
  float* lse = nullptr;  // [batch, q_tokens, q_heads] natural log of the softmax sum, or null

  // Tile of (sequence, page, KV head): page_address[sequence, page] + page_layer_offset
  // + head * page_head_stride. Bytes; tiles are 128-byte aligned. Of a BF16 page, rows as the
  // sink's: its offset and strides with page_address for the address.
  const uint64_t* page_address = nullptr;  // [batch, max_pages]
  int64_t page_layer_offset = 0;
  int64_t page_head_stride = 0;
  Bf16Rows sink;
  Bf16Rows recent;
  int recent_capacity = 1;  // slots of the ring

  const float* rotation_k = nullptr;  // [kv_heads, head_dim, head_dim] R_K, or null: identity
  const float* rotation_v = nullptr;  // [kv_heads, head_dim, head_dim] R_V, or null: identity
  const float* mean_v = nullptr;      // [kv_heads, head_dim] mu_v R_V, or null: zero
  // q . mu_k, or null: [batch, q_tokens, q_heads, position_blocks]. Page p uses block
  // min(p / pages_per_position_block, position_blocks - 1).
  const float* offset = nullptr;
  int position_blocks = 1;
  int pages_per_position_block = 1;
  const float* shift = nullptr;       // [q_heads] subtracted from INT2 logits, nats, or null
  const float* sink_logit = nullptr;  // [q_heads] learned logit in the softmax sum, or null

  float scale = 0.0f;     // 0: 1 / sqrt(head_dim)
  float soft_cap = 0.0f;  // > 0: cap * tanh(logit / cap)
  int window = 0;         // > 0: attend the last `window` positions only

  CopyPath copy_path = CopyPath::kAuto;
  // The kernel before this one in the stream wrote neither tiles nor lengths nor plan (it may write
  // q, offsets and rows of the windows), nor did one that it did not wait for: its end then
  // overlaps this one's start.
  bool overlap_previous = false;

  const void* plan = nullptr;  // DecodePlanBytes(shape), after PlanDecode
  void* workspace = nullptr;   // DecodeWorkspaceBytes(shape), zeroed once when allocated
};

}  // namespace crumb::kernels::cuda
