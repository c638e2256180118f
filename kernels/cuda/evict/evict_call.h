// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "kernels/quantize.h"
#include "kernels/tile.h"

// Arguments of EvictWindows (evict.h). This header is plain data and needs no CUDA header. All
// pointers are device pointers.
namespace crumb::kernels::cuda {

// Prepared by PrepareEvictRotation and PrepareEvictFeedback (constants.h).
struct EvictRotation;
struct EvictFeedback;

// Constants of every (layer, KV head), for K or for V.
struct EvictTransform {
  const EvictRotation* rotation = nullptr;  // [layers, kv_heads] R of y = x R; null: identity
  // [layers, kv_heads, position_blocks, head_dim] mu R; null: zero
  const float* mean = nullptr;
  float clip = 0.0f;  // fraction of |y| that is kept, (0, 1]; <= 0: no clip
  // [layers, kv_heads] U of Method::kCrumb, by which a channel's error propagates to later
  // channels; null: none
  const EvictFeedback* feedback = nullptr;
};

struct EvictParams {
  TileShape tile;
  // Format of the pages. With kBf16 rows are copied unchanged, and method, transforms, position
  // blocks and workspace are ignored.
  PageFormat format = PageFormat::kInt2;
  Method method = Method::kOscar;
  int layers = 1;
  int kv_heads = 1;
  int windows_max = 1;               // determines the grid
  const int32_t* windows = nullptr;  // [1] windows of this step, at most windows_max

  // Token t of window w, layer and KV head lies in ring slot (ring_begin[w] + t) % ring_capacity.
  // Its K row begins at ring_address[w] + layer * ring_layer_stride + head * ring_head_stride +
  // slot * ring_token_stride, and its V row ring_v_offset further. Strides are in bytes and
  // multiples of 16. REQUIRES: a ring has at least as many slots as a window has tokens.
  const uint64_t* ring_address = nullptr;  // [windows_max]
  const int32_t* ring_begin = nullptr;     // [windows_max] not negative
  int ring_capacity = 64;
  int64_t ring_layer_stride = 0;
  int64_t ring_head_stride = 0;
  int64_t ring_token_stride = 0;
  int64_t ring_v_offset = 0;

  // The tile of (window, layer, head) begins at tile_base + tile_address[w] + layer *
  // tile_layer_stride + head * tile_head_stride, 128-byte aligned.
  uint64_t tile_base = 0;
  const uint64_t* tile_address = nullptr;  // [windows_max]
  int64_t tile_layer_stride = 0;
  int64_t tile_head_stride = 0;

  EvictTransform k;
  EvictTransform v;
  const int32_t* position_block = nullptr;  // [windows_max] index of the mean; null: 0
  int position_blocks = 1;

  // [windows_max] status bits of kernels/quantize.h are OR-ed in; or null
  uint32_t* status = nullptr;
  // [windows_max, layers, kv_heads] CRC-32C of each tile, or null. REQUIRES, if not null:
  // `workspace` has EvictWorkspaceBytes and was zeroed once when allocated; calls that run one
  // after another share it.
  uint32_t* checksums = nullptr;
  void* workspace = nullptr;

  // Lets this kernel start while the previous kernel of the stream still runs; it then reads rows
  // at once. REQUIRES: the previous kernel wrote nothing that this one reads and reads nothing that
  // this one writes, and earlier kernels whose output this one reads had ended when the previous
  // one began.
  bool overlap_previous = false;

  // Most launches have no windows: blocks read their number before they load constants, so that
  // such a launch is short. Otherwise constants are loaded at once, which makes other launches
  // shorter.
  bool rarely_any = false;
};

}  // namespace crumb::kernels::cuda
