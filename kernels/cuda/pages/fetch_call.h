// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>

// Arguments of FetchTiles (pages.h). This header is plain data and needs no CUDA header. All
// pointers are device pointers.
namespace crumb::kernels::cuda {

// Tile i (a KV head) of layer l of page j is copied from from[j] + l * from_layer_stride[j] + i *
// tile_bytes to to[j] + l * to_layer_stride + i * tile_bytes, for l in [layer_begin, layer_end) and
// i in [0, tiles_per_layer).
struct FetchParams {
  size_t tile_bytes = 0;  // a multiple of 16
  int pages = 0;
  int tiles_per_layer = 1;
  int layer_begin = 0;
  int layer_end = 1;
  // [pages] 16-byte aligned addresses that the device can read; pinned host memory is one kind. A
  // page whose two addresses are equal is verified where it lies. If `from` is null, all pages are.
  const uint64_t* from = nullptr;
  const int64_t* from_layer_stride = nullptr;  // [pages]
  const uint64_t* to = nullptr;                // [pages] in device memory, 16-byte aligned
  int64_t to_layer_stride = 0;
  // Expected checksums: that of tile i of layer l of page j is element l * checksums_layer_stride +
  // j * tiles_per_layer + i.
  const uint32_t* checksums = nullptr;
  int64_t checksums_layer_stride = 0;
  uint32_t* status = nullptr;  // [pages] set to 1 if a tile differs, else unchanged
  // Bound on the number of thread blocks, each of eight warps with one tile in flight per warp; 0:
  // as many as fit on the device. Over PCIe a few blocks saturate the link and leave the other SMs
  // to the engine.
  int blocks = 0;
};

}  // namespace crumb::kernels::cuda
