// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "bench/kernels/evict_bench.h"

#include <algorithm>

#include "bench/kernels/device_memory.h"
#include "bench/kernels/device_rates.h"
#include "bench/kernels/random_data.h"
#include "kernels/cuda/evict.h"

namespace crumb::bench {
namespace {

constexpr int kHeads = 8;
constexpr int kDim = 128;
constexpr int kTokens = 64;

}  // namespace

EvictResult RunEvict(const EvictWorkload& w) {
  const int windows = w.tokens / kTokens;
  const kernels::TileShape tile;
  const size_t matrices = static_cast<size_t>(w.layers) * kHeads;
  const int64_t row_bytes = 2 * kDim, head_bytes = 2 * kTokens * row_bytes;
  // Enough copies of inputs and outputs that a replay finds none of them in L2.
  const size_t call_bytes = matrices * windows * (head_bytes + tile.int2_bytes());
  const int copies = static_cast<int>(std::clamp<size_t>((size_t{256} << 20) / call_bytes, 1, 20));
  const size_t rows = matrices * windows * copies * 2 * kTokens;
  const Device<kernels::Bf16> ring = Allocate<kernels::Bf16>(rows * kDim);
  FillBf16(rows * kDim, 3, ring.get());
  const Device<uint8_t> tiles = Allocate<uint8_t>(matrices * windows * copies * tile.int2_bytes());
  std::vector<float> rotation;
  std::mt19937 random(9);
  for (int i = 0; i < 2; ++i) {
    const std::vector<float> r = RandomRotation(kDim, random);
    rotation.insert(rotation.end(), r.begin(), r.end());
  }
  // Every matrix has its own copy of R.
  std::vector<float> all_rotations;
  for (size_t i = 0; i < matrices; ++i) {
    all_rotations.insert(all_rotations.end(), rotation.begin(), rotation.end());
  }
  const Device<float> rotations = Upload(all_rotations);
  const Device<float> means = Upload(std::vector<float>(2 * matrices * kDim, 0.01f));
  std::vector<uint64_t> ring_address, tile_address;
  for (int i = 0; i < windows * copies; ++i) {
    ring_address.push_back(reinterpret_cast<uint64_t>(ring.get()) + i * matrices * head_bytes);
    tile_address.push_back(reinterpret_cast<uint64_t>(tiles.get()) +
                           i * matrices * tile.int2_bytes());
  }
  const Device<uint64_t> device_ring = Upload(ring_address), device_tile = Upload(tile_address);
  const Device<int32_t> begin = Upload(std::vector<int32_t>(windows * copies, 0));
  const Device<int32_t> count = Upload(std::vector<int32_t>{windows});

  kernels::cuda::EvictParams p;
  p.tile = tile;
  p.layers = w.layers;
  p.kv_heads = kHeads;
  p.windows_max = windows;
  p.windows = count.get();
  p.ring_begin = begin.get();
  p.ring_capacity = kTokens;
  p.ring_head_stride = head_bytes;
  p.ring_layer_stride = kHeads * head_bytes;
  p.ring_token_stride = row_bytes;
  p.ring_v_offset = kTokens * row_bytes;
  p.tile_head_stride = static_cast<int64_t>(tile.int2_bytes());
  p.tile_layer_stride = kHeads * p.tile_head_stride;
  if (w.method != "naive") {
    p.k = {rotations.get(), means.get(), 0.96f};
    p.v = {rotations.get() + matrices * kDim * kDim, means.get() + matrices * kDim, 0.92f};
  }
  EvictResult result;
  result.us = TimeGraph([&](cudaStream_t stream) {
                for (int i = 0; i < copies; ++i) {
                  p.ring_address = device_ring.get() + i * windows;
                  p.tile_address = device_tile.get() + i * windows;
                  Check(kernels::cuda::EvictWindows(p, stream), "evict");
                }
              }) /
              copies;
  result.bytes = static_cast<double>(call_bytes);
  return result;
}

std::vector<EvictWorkload> StandardEvictWorkloads() {
  return {{"oscar", 1, 256, 4},   {"oscar", 1, 4096, 10}, {"oscar", 1, 65536, 130},
          {"oscar", 36, 256, 45}, {"naive", 1, 4096, 0},  {"naive", 1, 65536, 0},
          {"naive", 36, 256, 0}};
}

}  // namespace crumb::bench
