// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "kernels/cuda/evict/evict.h"
#include "kernels/tile.h"

// INT2 page tiles <-> an engine's own paged KV, on the GPU, all layers in one call. All pointers
// are device pointers. docs/kernels/paged_kv.md has the account.
namespace crumb::kernels::cuda {

enum class KvElement : uint8_t { kBf16, kFp8E4m3 };
// Rows of one token and all heads together, or of one head and all tokens of a block.
enum class KvLayout : uint8_t { kNhd, kHnd };
// A block's V in an allocation of its own, or behind the block's K.
enum class KvPlacement : uint8_t { kApart, kTogether };

// Token t of sequence s lies in block b = block_table[s, t / block_tokens]. Its K row of (layer,
// head) begins at k_address[layer] + b * block_stride + t % block_tokens * token_stride + head *
// head_stride, its V row the same way from v_address. Bytes, multiples of 16. A negative entry of
// the table: the token is not there, nothing of it is read or written.
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

  // Sets the strides of dense blocks of block_tokens tokens.
  void SetStrides(KvLayout layout, KvPlacement placement, int kv_heads, int head_dim);
};

// Which tokens a page holds: first_token[p] .. first_token[p] + tile.tokens - 1 of sequence[p].
struct PageTokens {
  const int32_t* sequence = nullptr;     // [pages_max] row of the block table
  const int32_t* first_token = nullptr;  // [pages_max]
};

// Static data of every (layer, KV head), for K or for V.
struct DequantizeTransform {
  const float* rotation = nullptr;  // [layers, kv_heads, head_dim, head_dim] R; null: identity
  // [layers, kv_heads, position_blocks, head_dim] mu in the model's basis; null: zero
  const float* mean = nullptr;
};

// Row = (minimum + scale * code) R' + mu, rounded to bf16 once.
struct DequantizeParams {
  TileShape tile;
  int layers = 1;
  int kv_heads = 1;
  int pages_max = 1;               // fixes the grid
  const int32_t* pages = nullptr;  // [1] pages of this call, at most pages_max

  // Tile of (page, layer, head): page_address[p] + layer * tile_layer_stride + head *
  // tile_head_stride; 128-byte aligned.
  const uint64_t* page_address = nullptr;  // [pages_max]
  int64_t tile_layer_stride = 0;
  int64_t tile_head_stride = 0;

  PageTokens tokens;
  PagedKv kv;  // element kBf16
  DequantizeTransform k;
  DequantizeTransform v;
  const int32_t* position_block = nullptr;  // [pages_max] which mean; null: 0
  int position_blocks = 1;
};

// Whether the kernel serves this tile: 64 tokens.
bool DequantizeSupported(const TileShape& tile);

// Enqueues one kernel: no allocation, no synchronisation, can be captured. Deterministic.
// cudaErrorInvalidValue: sizes not supported.
cudaError_t DequantizePages(const DequantizeParams& params, cudaStream_t stream);

struct QuantizeFromParams {
  // All but its ring: which windows (one a page), where tiles go, transforms, status.
  EvictParams evict;
  PageTokens tokens;  // [evict.windows_max]
  PagedKv kv;         // a token that is not there counts as a row of zeros
  // FP8: an element is its e4m3 value times this, rounded to bf16. Null: 1.
  const float* k_scale = nullptr;  // [layers]
  const float* v_scale = nullptr;  // [layers]
  void* workspace = nullptr;       // QuantizeFromWorkspaceBytes(evict), 256-byte aligned
};

size_t QuantizeFromWorkspaceBytes(const EvictParams& evict);

// The engine's rows of whole pages -> page tiles: gathers them, then EvictWindows. Enqueues two
// kernels: no allocation, no synchronisation, can be captured. cudaErrorInvalidValue: sizes not
// supported.
cudaError_t QuantizeFromPages(const QuantizeFromParams& params, cudaStream_t stream);

}  // namespace crumb::kernels::cuda
