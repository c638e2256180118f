// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>

// What a call of FetchTiles is given (fetch.h). Plain data that needs no CUDA header. Pointers are
// device pointers.
namespace crumb::kernels::cuda {

// Tile (layer l, i) of run j, l in [layer_begin, layer_end), i in [0, tiles_per_run), goes from
// from[j] + l * from_layer_stride[j] + i * tile_bytes to to[j] + l * to_layer_stride +
// i * tile_bytes: a run is a page, i a KV head.
struct FetchParams {
  size_t tile_bytes = 0;  // a multiple of 16
  int runs = 0;
  int tiles_per_run = 1;
  int layer_begin = 0;
  int layer_end = 1;
  // [runs] in memory that the device can read, pinned host memory too; 16-byte aligned. A run whose
  // two addresses are equal is summed where it lies; null: all of them are.
  const uint64_t* from = nullptr;
  const int64_t* from_layer_stride = nullptr;  // [runs]
  const uint64_t* to = nullptr;                // [runs] in device memory, 16-byte aligned
  int64_t to_layer_stride = 0;
  // What the tiles should have: tile (l, i) of run j at l * sums_layer_stride + j * tiles_per_run +
  // i, in elements.
  const uint32_t* sums = nullptr;
  int64_t sums_layer_stride = 0;
  uint32_t* status = nullptr;  // [runs] set to 1 where a tile differs, else left as it is
  // Blocks of eight warps at most, each of which has a tile on its way; 0: as many as there is room
  // for. Over PCIe few saturate the link, and leave the multiprocessors to others.
  int blocks = 0;
};

}  // namespace crumb::kernels::cuda
