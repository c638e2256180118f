// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "kernels/quantize.h"
#include "kernels/tile.h"

// What a call of EvictWindows is given (evict.h). Plain data that needs no CUDA header. All
// pointers are device pointers.
namespace crumb::kernels::cuda {

// Made by PrepareEvictRotation and PrepareEvictFeedback, of evict_constants.h.
struct EvictRotation;
struct EvictFeedback;

// Static data of every (layer, KV head), for K or for V.
struct EvictTransform {
  const EvictRotation* rotation = nullptr;  // [layers, kv_heads] y = x R; null: identity
  // [layers, kv_heads, position_blocks, head_dim] mu R; null: zero
  const float* mean = nullptr;
  float clip = 0.0f;  // fraction of |y| kept, (0, 1]; <= 0: no clip
  // [layers, kv_heads], Method::kCrumb only: what a channel's error adds to later ones; null:
  // nothing
  const EvictFeedback* feedback = nullptr;
};

struct EvictParams {
  TileShape tile;
  // Of the pages. With kBf16 rows stay as they are: method, transforms, position blocks and
  // workspace are not looked at.
  PageFormat format = PageFormat::kInt2;
  Method method = Method::kOscar;
  int layers = 1;
  int kv_heads = 1;
  int windows_max = 1;               // fixes the grid
  const int32_t* windows = nullptr;  // [1] windows of this step, at most windows_max

  // Window w: token t of (layer, KV head) lies in ring slot (ring_begin[w] + t) % ring_capacity,
  // its K row at ring_address[w] + layer * ring_layer_stride + head * ring_head_stride + slot *
  // ring_token_stride, its V row ring_v_offset further. Bytes, multiples of 16. A ring has at least
  // as many slots as a window has tokens.
  const uint64_t* ring_address = nullptr;  // [windows_max]
  const int32_t* ring_begin = nullptr;     // [windows_max] not negative
  int ring_capacity = 64;
  int64_t ring_layer_stride = 0;
  int64_t ring_head_stride = 0;
  int64_t ring_token_stride = 0;
  int64_t ring_v_offset = 0;

  // Tile of (window, layer, head): tile_address[w] + layer * tile_layer_stride + head *
  // tile_head_stride; 128-byte aligned.
  const uint64_t* tile_address = nullptr;  // [windows_max]
  int64_t tile_layer_stride = 0;
  int64_t tile_head_stride = 0;

  EvictTransform k;
  EvictTransform v;
  const int32_t* position_block = nullptr;  // [windows_max] which mean; null: 0
  int position_blocks = 1;

  uint32_t* status = nullptr;  // [windows_max] bits of kernels/quantize.h are OR-ed in; or null
  // [windows_max, layers, kv_heads] CRC-32C of each tile; null: none. With it, `workspace`:
  // EvictWorkspaceBytes, zeroed once when allocated; calls that run one after another share it.
  uint32_t* sums = nullptr;
  void* workspace = nullptr;

  // The kernel before this one in the stream wrote nothing that this one reads, and reads nothing
  // that this one writes: its end then overlaps this one's start, which reads rows already. Others
  // whose output this one reads had ended when the one before began.
  bool overlap_previous = false;
};

}  // namespace crumb::kernels::cuda
