// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "bench/kernels/paged_bench.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "bench/kernels/device_memory.h"
#include "bench/kernels/device_rates.h"
#include "bench/kernels/random_data.h"
#include "kernels/bf16.h"
#include "kernels/cuda/pages/pages.h"
#include "kernels/quantize.h"

namespace crumb::bench {
namespace {

using kernels::cuda::AppendParams;
using kernels::cuda::DequantizeParams;

constexpr int kHeads = 8;
constexpr int kDim = 128;
constexpr int kTokens = 64;
constexpr int kCalls = 20;

std::vector<int32_t> Permuted(int count, std::mt19937& random) {
  std::vector<int32_t> order(count);
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), random);
  return order;
}

// The inputs on the host, from which expected outputs are computed.
struct DequantizeData {
  std::vector<float> rotation;  // [kDim, kDim], the same for all matrices
  float mean = 0.0f;            // mean of all rotated elements
  std::vector<int32_t> slot;    // per page: the slot of its tiles
  std::vector<int32_t> table;   // block table
};

// Returns the largest error of the rows of some tiles of the first layer, whose values are
// (minimum + scale * code) R' + mean.
double WorstRow(const DequantizeWorkload& w, const DequantizeParams& p, const DequantizeData& data,
                const uint8_t* tiles, const kernels::Bf16* rows) {
  const size_t page_bytes = static_cast<size_t>(w.layers) * kHeads * p.tile.int2_bytes();
  const size_t part = static_cast<size_t>(w.tokens) * kHeads * kDim;
  std::vector<float> y[2] = {std::vector<float>(kTokens * kDim),
                             std::vector<float>(kTokens * kDim)};
  double worst = 0.0;
  const int pages = w.tokens / kTokens, step = std::max(1, pages / 24);
  for (int page = 0; page < pages; page += step) {
    const int head = page / step % kHeads;
    const std::vector<uint8_t> tile = Download(
        tiles + data.slot[page] * page_bytes + head * p.tile.int2_bytes(), p.tile.int2_bytes());
    kernels::DequantizeTile(p.tile, tile.data(), y[0].data(), y[1].data());
    for (int t = page % 5; t < kTokens; t += 9) {
      const int token = page * kTokens + t;
      const int64_t at = data.table[token / w.block_tokens] * p.kv.block_stride +
                         token % w.block_tokens * p.kv.token_stride + head * p.kv.head_stride;
      for (const int value : {0, 1}) {
        const bool rotated = value == 0 ? w.rotate_k : w.rotate_v;
        const std::vector<kernels::Bf16> row = Download(rows + value * part + at / 2, kDim);
        const float* from = y[value].data() + t * kDim;
        double error = 0.0, norm = 0.0;
        for (int i = 0; i < kDim; ++i) {
          double expected = from[i];
          if (rotated) {
            expected = data.mean;
            for (int j = 0; j < kDim; ++j) {
              expected += static_cast<double>(from[j]) * data.rotation[i * kDim + j];
            }
          }
          const double difference = kernels::Bf16ToFloat(row[i]) - expected;
          error += difference * difference;
          norm += expected * expected;
        }
        worst = std::max(worst, std::sqrt(error / norm));
      }
    }
  }
  return worst;
}

// Returns parameters with the sizes and strides of a workload.
DequantizeParams ShapeOf(const DequantizeWorkload& w, const kernels::TileShape& tile) {
  DequantizeParams p;
  p.layers = w.layers;
  p.kv_heads = kHeads;
  p.pages_max = w.tokens / kTokens;
  p.tile_head_stride = static_cast<int64_t>(tile.int2_bytes());
  p.tile_layer_stride = kHeads * p.tile_head_stride;
  p.kv.block_tokens = w.block_tokens;
  p.kv.SetStrides(w.hnd ? kernels::cuda::KvLayout::kHnd : kernels::cuda::KvLayout::kNhd,
                  kernels::cuda::KvPlacement::kApart, kHeads, kDim);
  p.kv.blocks_max = w.tokens / w.block_tokens;
  return p;
}

}  // namespace

PagedResult RunDequantize(const DequantizeWorkload& w) {
  const kernels::TileShape tile;
  const int pages = w.tokens / kTokens, blocks = w.tokens / w.block_tokens;
  const size_t matrices = static_cast<size_t>(w.layers) * kHeads;
  const size_t page_bytes = matrices * tile.int2_bytes();
  std::mt19937 random(4);
  const Device<uint8_t> tiles = Allocate<uint8_t>(pages * page_bytes);
  FillTiles(tile, pages * matrices, 2, tiles.get());
  const size_t layer_rows = static_cast<size_t>(w.tokens) * kHeads;
  const Device<kernels::Bf16> rows = Allocate<kernels::Bf16>(2 * w.layers * layer_rows * kDim);
  std::vector<float> all_rotations;
  DequantizeData data;
  data.mean = 0.01f;
  data.rotation = RandomRotation(kDim, random);
  for (size_t i = 0; i < matrices; ++i) {
    all_rotations.insert(all_rotations.end(), data.rotation.begin(), data.rotation.end());
  }
  const Device<float> rotations = Upload(all_rotations);
  const Device<float> means = Upload(std::vector<float>(matrices * kDim, data.mean));
  std::vector<uint64_t> page_address, k_address, v_address;
  data.slot = Permuted(pages, random);
  data.table = Permuted(blocks, random);
  for (const int32_t slot : data.slot) {
    page_address.push_back(reinterpret_cast<uint64_t>(tiles.get()) + slot * page_bytes);
  }
  for (int layer = 0; layer < w.layers; ++layer) {
    const uint64_t at = reinterpret_cast<uint64_t>(rows.get()) + layer * layer_rows * 4 * kDim;
    k_address.push_back(at);
    v_address.push_back(at + layer_rows * 2 * kDim);
  }
  std::vector<int32_t> first_token;
  for (int i = 0; i < pages; ++i) first_token.push_back(i * kTokens);
  const Device<uint64_t> device_page = Upload(page_address), device_k = Upload(k_address),
                         device_v = Upload(v_address);
  const Device<int32_t> device_first = Upload(first_token),
                        device_sequence = Upload(std::vector<int32_t>(pages, 0)),
                        device_table = Upload(data.table),
                        count = Upload(std::vector<int32_t>{pages});
  DequantizeParams p = ShapeOf(w, tile);
  p.pages = count.get();
  p.page_address = device_page.get();
  p.tokens = {device_sequence.get(), device_first.get()};
  p.kv.k_address = device_k.get();
  p.kv.v_address = device_v.get();
  p.kv.block_table = device_table.get();
  if (w.rotate_k) p.k = {rotations.get(), means.get()};
  if (w.rotate_v) p.v = {rotations.get(), means.get()};
  PagedResult result;
  result.us = TimeGraph(
      [&](cudaStream_t stream) { Check(kernels::cuda::DequantizePages(p, stream), "dequantize"); });
  result.bytes = static_cast<double>(pages * page_bytes) +
                 static_cast<double>(w.layers * layer_rows) * 4 * kDim;
  int l2_bytes = 0;
  Check(cudaDeviceGetAttribute(&l2_bytes, cudaDevAttrL2CacheSize, 0), "size of L2");
  result.warm = result.bytes < 2.0 * l2_bytes;
  result.rel_error = WorstRow(w, p, data, tiles.get(), rows.get());
  return result;
}

PagedResult RunAppend(const AppendWorkload& w) {
  constexpr int kCapacity = 392;
  const size_t new_rows = static_cast<size_t>(w.batch) * w.q_tokens * kHeads;
  const Device<kernels::Bf16> fresh = Allocate<kernels::Bf16>(kCalls * 2 * new_rows * kDim);
  FillBf16(kCalls * 2 * new_rows * kDim, 8, fresh.get());
  const size_t ring_bytes = size_t{4} * kHeads * kCapacity * kDim;
  const Device<uint8_t> rings = Allocate<uint8_t>(kCalls * w.batch * ring_bytes);
  std::vector<uint64_t> address;
  std::vector<int32_t> begin;
  for (int i = 0; i < kCalls * w.batch; ++i) {
    address.push_back(reinterpret_cast<uint64_t>(rings.get()) + i * ring_bytes);
    begin.push_back(i * 37 % kCapacity);
  }
  const Device<uint64_t> device_address = Upload(address);
  const Device<int32_t> device_begin = Upload(begin),
                        sink = Upload(std::vector<int32_t>(w.batch, 64)),
                        pages = Upload(std::vector<int32_t>(w.batch, 100)),
                        recent = Upload(std::vector<int32_t>(w.batch, 287));
  AppendParams p;
  p.batch = w.batch;
  p.q_tokens = w.q_tokens;
  p.kv_heads = kHeads;
  p.head_dim = kDim;
  p.head_stride = kDim;
  p.token_stride = kHeads * kDim;
  p.sequence_stride = w.q_tokens * p.token_stride;
  p.lengths = {sink.get(), pages.get(), recent.get(), device_begin.get()};
  p.recent_capacity = kCapacity;
  PagedResult result;
  result.us = TimeGraph([&](cudaStream_t stream) {
                for (int i = 0; i < kCalls; ++i) {
                  p.k = fresh.get() + 2 * i * new_rows * kDim;
                  p.v = fresh.get() + (2 * i + 1) * new_rows * kDim;
                  p.recent = {device_address.get() + i * w.batch, 0, 4 * kCapacity * kDim, 2 * kDim,
                              2 * kCapacity * kDim};
                  p.sink = p.recent;
                  Check(kernels::cuda::AppendRows(p, stream), "append");
                }
              }) /
              kCalls;
  result.bytes = static_cast<double>(new_rows) * 8 * kDim;
  return result;
}

std::vector<DequantizeWorkload> StandardDequantizeWorkloads() {
  return {{"plain", 65536, 1, 16, false, false, false, 80},
          {"plain HND", 65536, 1, 16, false, false, true, 80},
          {"plain 64", 65536, 1, 64, false, false, false, 80},
          {"plain 1", 65536, 1, 1, false, false, false, 80},
          {"R_K", 65536, 1, 16, true, false, false, 70},
          {"R_K R_V", 65536, 1, 16, true, true, false, 55},
          {"R_K R_V HND", 65536, 1, 16, true, true, true, 55},
          {"R_K R_V", 4096, 1, 16, true, true, false, 0},
          {"R_K R_V", 4096, 36, 16, true, true, false, 55}};
}

std::vector<AppendWorkload> StandardAppendWorkloads() {
  return {{32, 1, 2.5}, {128, 1, 0.0}, {32, 8, 0.0}};
}

}  // namespace crumb::bench
