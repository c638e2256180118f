// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/tile.h"

// Evicted windows: the 64 oldest BF16 rows of recent rings -> INT2 page tiles, on the GPU, for all
// layers and sequences of a step in one launch. Same definition as QuantizeTile in
// kernels/quantize.h for the methods oscar, hadamard and naive, which differ by their transforms.
// All pointers are device pointers.
namespace crumb::kernels::cuda {

// Static data of every (layer, KV head), for K or for V.
struct EvictTransform {
  const float* rotation =
      nullptr;                  // [layers, kv_heads, head_dim, head_dim] y = x R; null: identity
  const float* mean = nullptr;  // [layers, kv_heads, head_dim] mu R; null: zero
  float clip = 0.0f;            // fraction of |y| kept, (0, 1]; <= 0: no clip
};

struct EvictParams {
  TileShape tile;
  int layers = 1;
  int kv_heads = 1;
  int windows_max = 1;               // fixes the grid
  const int32_t* windows = nullptr;  // [1] windows of this step, at most windows_max

  // Window w: token t of (layer, KV head) lies in ring slot (ring_begin[w] + t) % ring_capacity,
  // its K row at ring_address[w] + layer * ring_layer_stride + head * ring_head_stride + slot *
  // ring_token_stride, its V row ring_v_offset further. Bytes, multiples of 16.
  const uint64_t* ring_address = nullptr;  // [windows_max]
  const int32_t* ring_begin = nullptr;     // [windows_max]
  int ring_capacity = 1;
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
  uint32_t* status = nullptr;  // [windows_max] bits of kernels/quantize.h are OR-ed in; or null
};

// Whether the kernel serves this tile.
bool EvictSupported(const TileShape& tile);

// Enqueues one kernel: no allocation, no synchronisation, can be captured. Deterministic.
// cudaErrorInvalidValue: tile not supported.
cudaError_t EvictWindows(const EvictParams& params, cudaStream_t stream);

}  // namespace crumb::kernels::cuda
