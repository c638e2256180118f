// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "kernels/cuda/evict/evict_call.h"
#include "kernels/tile.h"

// Arguments of DequantizePages and QuantizeFromPages (pages.h). This header is plain data and
// needs no CUDA header. All pointers are device pointers.
namespace crumb::kernels::cuda {

enum class KvElement : uint8_t { kBf16, kFp8E4m3 };
// The order of rows within a block: kNhd stores the rows of one token and all heads together, kHnd
// the rows of one head and all tokens.
enum class KvLayout : uint8_t { kNhd, kHnd };
// Whether a block's V rows are in an allocation of their own or follow the block's K rows.
enum class KvPlacement : uint8_t { kApart, kTogether };

// An engine's paged KV cache. Token t of sequence s lies in block b = block_table[s, t /
// block_tokens]. Its K row of (layer, head) begins at k_address[layer] + b * block_stride + t %
// block_tokens * token_stride + head * head_stride, and its V row likewise from v_address. Strides
// are in bytes and multiples of 16. A negative entry of the table marks absent tokens, which are
// neither read nor written.
struct PagedKv {
  KvElement element = KvElement::kBf16;
  int block_tokens = 16;  // 1 to 128
  int64_t block_stride = 0;
  int64_t token_stride = 0;
  int64_t head_stride = 0;
  const uint64_t* k_address = nullptr;   // [layers]
  const uint64_t* v_address = nullptr;   // [layers]
  const int32_t* block_table = nullptr;  // [sequences, blocks_max]
  int blocks_max = 1;

  // Returns whether block_tokens and blocks_max are within their bounds.
  bool Valid() const { return block_tokens >= 1 && block_tokens <= 128 && blocks_max >= 1; }

  // Sets the strides for dense blocks of block_tokens tokens.
  void SetStrides(KvLayout layout, KvPlacement placement, int kv_heads, int head_dim);
};

// The tokens of each page: page p holds tokens first_token[p] to first_token[p] + tile.tokens - 1
// of sequence[p].
struct PageTokens {
  const int32_t* sequence = nullptr;     // [pages_max] row of the block table
  const int32_t* first_token = nullptr;  // [pages_max]
};

// Constants of every (layer, KV head), for K or for V.
struct DequantizeTransform {
  const float* rotation = nullptr;  // [layers, kv_heads, head_dim, head_dim] R; null: identity
  // [layers, kv_heads, position_blocks, head_dim] mu in the model's basis; null: zero
  const float* mean = nullptr;
};

// Arguments of DequantizePages. A row is (minimum + scale * code) R' + mu, rounded to bf16 once.
struct DequantizeParams {
  TileShape tile;
  // Format of the tiles. With kBf16 rows are copied unchanged, and transforms and position blocks
  // are ignored.
  PageFormat format = PageFormat::kInt2;
  int layers = 1;
  int kv_heads = 1;
  int pages_max = 1;               // determines the grid
  const int32_t* pages = nullptr;  // [1] pages of this call, at most pages_max

  // The tile of (page, layer, head) begins at page_address[p] + layer * tile_layer_stride + head *
  // tile_head_stride, 128-byte aligned.
  const uint64_t* page_address = nullptr;  // [pages_max]
  int64_t tile_layer_stride = 0;
  int64_t tile_head_stride = 0;

  PageTokens tokens;
  PagedKv kv;
  // Rows of FP8 are divided by this factor of their layer after the rounding to bf16, and rounded
  // to the nearest value of e4m3, limited to its largest. Null: 1.
  const float* k_scale = nullptr;  // [layers]
  const float* v_scale = nullptr;  // [layers]
  DequantizeTransform k;
  DequantizeTransform v;
  const int32_t* position_block = nullptr;  // [pages_max] index of the mean; null: 0
  int position_blocks = 1;
};

struct QuantizeFromParams {
  // Everything but the ring: windows (one per page), destinations of tiles, transforms, status.
  EvictParams evict;
  PageTokens tokens;  // [evict.windows_max]
  PagedKv kv;         // absent tokens count as rows of zeros
  // FP8 elements are multiplied by this factor of their layer and rounded to bf16. Null: 1.
  const float* k_scale = nullptr;  // [layers]
  const float* v_scale = nullptr;  // [layers]
  void* workspace = nullptr;       // QuantizeFromWorkspaceBytes(evict), 256-byte aligned
};

}  // namespace crumb::kernels::cuda
