// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "bench/kernels/evict_bench.h"

#include <algorithm>
#include <cmath>
#include <random>

#include "bench/kernels/device_memory.h"
#include "bench/kernels/device_rates.h"
#include "bench/kernels/evict_transforms.h"
#include "bench/kernels/random_data.h"
#include "kernels/bf16.h"
#include "kernels/cuda/evict/evict.h"
#include "kernels/cuda/pages/pages.h"
#include "kernels/quantize.h"

namespace crumb::bench {
namespace {

constexpr int kHeads = 8;
constexpr int kDim = 128;
constexpr int kTokens = 64;
// Pages with different contents in a measurement of verification, which repeats them.
constexpr int kDistinctPages = 16;

// Computes CRC-32C bit by bit.
uint32_t Crc32c(const uint8_t* bytes, size_t size) {
  uint32_t crc = ~0u;
  for (size_t i = 0; i < size; ++i) {
    crc ^= bytes[i];
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1) != 0 ? 0x82F63B78u : 0u);
  }
  return ~crc;
}

// Compares tiles of the device with those of the CPU.
class Sample {
 public:
  // `rows` are K and then V of one window.
  void Add(const kernels::QuantizeParams& transforms, const std::vector<kernels::Bf16>& rows,
           const std::vector<uint8_t>& tile) {
    kernels::QuantizeParams p = transforms;
    alignas(128) uint8_t expected[kTileBytesMax];
    p.k = rows.data();
    p.v = rows.data() + kTokens * kDim;
    p.k_stride = p.v_stride = kDim;
    p.tile = expected;
    kernels::QuantizeTile(p);
    for (size_t i = 0; i < 2 * p.shape.code_bytes(); ++i) {
      for (int bits = expected[i] ^ tile[i]; bits != 0; bits >>= 2) different_ += (bits & 3) != 0;
      codes_ += 4;
    }
    own_error_ += WeightedError(p, tile.data());
    cpu_error_ += WeightedError(p, expected);
  }

  double CodesDiffer() const { return codes_ == 0 ? 0.0 : different_ / codes_; }
  double RelativeError() const { return std::abs(own_error_ - cpu_error_) / cpu_error_; }

 private:
  static constexpr size_t kTileBytesMax = 16384;

  static double WeightedError(const kernels::QuantizeParams& p, const uint8_t* tile) {
    std::vector<float> k(kTokens * kDim), v(kTokens * kDim);
    kernels::DequantizeTile(p.shape, tile, k.data(), v.data());
    return WeightedError(p.k, p.k_transform, k) + WeightedError(p.v, p.v_transform, v);
  }
  static double WeightedError(const kernels::Bf16* rows, const kernels::RowTransform& t,
                              const std::vector<float>& z) {
    double sum = 0.0;
    for (int row = 0; row < kTokens; ++row) {
      double error[kDim];
      for (int j = 0; j < kDim; ++j) {
        error[j] = -double{z[row * kDim + j]} - (t.mean == nullptr ? 0.0f : t.mean[j]);
      }
      for (int i = 0; i < kDim; ++i) {
        const double x = kernels::Bf16ToFloat(rows[row * kDim + i]);
        if (t.rotation == nullptr) error[i] += x;
        for (int j = 0; t.rotation != nullptr && j < kDim; ++j) {
          error[j] += x * t.rotation[i * kDim + j];
        }
      }
      for (int j = 0; j < kDim; ++j) {
        double weighted = error[j];
        for (int i = 0; t.feedback != nullptr && i < j; ++i) {
          weighted += error[i] * t.feedback[i * kDim + j];
        }
        sum += weighted * weighted;
      }
    }
    return sum;
  }

  double different_ = 0.0, codes_ = 0.0, own_error_ = 0.0, cpu_error_ = 0.0;
};

// Returns parameters with the sizes and strides of a workload, whose windows are adjacent.
kernels::cuda::EvictParams ShapeOf(const EvictWorkload& w, const kernels::TileShape& tile,
                                   int windows) {
  const int64_t row_bytes = 2 * kDim, head_bytes = 2 * kTokens * row_bytes;
  kernels::cuda::EvictParams p;
  p.tile = tile;
  p.layers = w.layers;
  p.kv_heads = kHeads;
  p.windows_max = windows;
  p.ring_capacity = kTokens;
  p.ring_head_stride = head_bytes;
  p.ring_layer_stride = kHeads * head_bytes;
  p.ring_token_stride = row_bytes;
  p.ring_v_offset = kTokens * row_bytes;
  p.tile_head_stride = static_cast<int64_t>(tile.int2_bytes());
  p.tile_layer_stride = kHeads * p.tile_head_stride;
  return p;
}

// Compares some of `count` evicted tiles with those of the CPU. `ring` has K and V of each window.
Sample CompareSample(const kernels::QuantizeParams& on_host, size_t count,
                     const kernels::Bf16* ring, const uint8_t* tiles) {
  constexpr size_t kSampleTiles = 24;
  const size_t tile_bytes = on_host.shape.int2_bytes(), window_values = 2 * kTokens * kDim;
  Sample sample;
  for (size_t i = 0; i < kSampleTiles; ++i) {
    const size_t at = count * i / kSampleTiles;
    sample.Add(on_host, Download(ring + at * window_values, window_values),
               Download(tiles + at * tile_bytes, tile_bytes));
  }
  return sample;
}

}  // namespace

EvictResult RunEvict(const EvictWorkload& w) {
  const int windows = w.tokens / kTokens;
  const kernels::TileShape tile;
  const size_t matrices = static_cast<size_t>(w.layers) * kHeads;
  const int64_t head_bytes = 4 * kTokens * kDim;
  // There are enough copies of inputs and outputs that a replay finds none of them in L2.
  const size_t call_bytes = matrices * windows * (head_bytes + tile.int2_bytes());
  const int copies = static_cast<int>(std::clamp<size_t>((size_t{256} << 20) / call_bytes, 1, 20));
  const size_t rows = matrices * windows * copies * 2 * kTokens;
  const Device<kernels::Bf16> ring = Allocate<kernels::Bf16>(rows * kDim);
  FillBf16(rows * kDim, 3, ring.get());
  const Device<uint8_t> tiles = Allocate<uint8_t>(matrices * windows * copies * tile.int2_bytes());
  const bool metric = w.method == "crumb-metric", crumb = metric || w.method == "crumb";
  const EvictTransforms transforms(static_cast<int>(matrices), metric);
  std::vector<uint64_t> ring_address, tile_address;
  for (int i = 0; i < windows * copies; ++i) {
    ring_address.push_back(reinterpret_cast<uint64_t>(ring.get()) + i * matrices * head_bytes);
    tile_address.push_back(reinterpret_cast<uint64_t>(tiles.get()) +
                           i * matrices * tile.int2_bytes());
  }
  const Device<uint64_t> device_ring = Upload(ring_address), device_tile = Upload(tile_address);
  const Device<int32_t> begin = Upload(std::vector<int32_t>(windows * copies, 0));
  const Device<int32_t> count = Upload(std::vector<int32_t>{windows});

  kernels::cuda::EvictParams p = ShapeOf(w, tile, windows);
  p.windows = count.get();
  p.ring_begin = begin.get();
  if (w.method != "naive") transforms.Set(&p);
  if (crumb) {
    p.method = kernels::Method::kCrumb;
    p.k.clip = p.v.clip = 0.92f;
  }
  const size_t tile_count = matrices * windows;
  const Device<uint32_t> sums = Allocate<uint32_t>(tile_count);
  const Device<uint64_t> workspace = Upload(std::vector<uint64_t>(tile_count, 0));
  if (w.sums) {
    p.checksums = sums.get();
    p.workspace = workspace.get();
  }
  p.overlap_previous = true;  // the previous launch evicts other windows
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
  kernels::QuantizeParams on_host;
  on_host.shape = tile;
  on_host.method = p.method;
  if (w.method != "naive") {
    on_host.k_transform = transforms.OnHost(p.k.clip, crumb);
    on_host.v_transform = transforms.OnHost(p.v.clip, crumb);
  }
  const Sample sample = CompareSample(on_host, tile_count * copies, ring.get(), tiles.get());
  result.codes_differ = sample.CodesDiffer();
  result.rel_error = sample.RelativeError();
  return result;
}

std::vector<EvictWorkload> StandardEvictWorkloads() {
  std::vector<EvictWorkload> workloads;
  for (const bool sums : {false, true}) {
    workloads.insert(workloads.end(), {{"oscar", 1, 256, 4, sums},
                                       {"oscar", 1, 4096, 10, sums},
                                       {"oscar", 1, 65536, 130, sums},
                                       {"oscar", 36, 256, 45, sums},
                                       {"crumb", 1, 256, 8, sums},
                                       {"crumb", 1, 4096, 30, sums},
                                       {"crumb", 1, 65536, 400, sums},
                                       {"crumb", 36, 256, 85, sums}});
  }
  workloads.insert(workloads.end(), {{"naive", 1, 4096}, {"naive", 1, 65536}, {"naive", 36, 256}});
  workloads.insert(workloads.end(), {{"crumb-metric", 1, 256},
                                     {"crumb-metric", 1, 4096},
                                     {"crumb-metric", 1, 65536},
                                     {"crumb-metric", 36, 256}});
  return workloads;
}

VerifyResult RunVerify(const VerifyWorkload& w) {
  const kernels::TileShape tile;
  const size_t tile_bytes = tile.int2_bytes(), page_bytes = kHeads * tile_bytes;
  // Pages repeat kDistinctPages random ones, whose checksums the host computes. One tile is changed
  // afterwards, and the check has to find it.
  std::mt19937 random(5);
  std::vector<uint8_t> pages(kDistinctPages * page_bytes);
  for (uint8_t& byte : pages) byte = static_cast<uint8_t>(random());
  std::vector<uint32_t> checksums;
  for (size_t i = 0; i < kDistinctPages * kHeads; ++i) {
    checksums.push_back(Crc32c(pages.data() + i * tile_bytes, tile_bytes));
  }
  const Device<uint8_t> tiles = Allocate<uint8_t>(w.pages * page_bytes);
  std::vector<uint64_t> address(w.pages);
  std::vector<uint32_t> expected;
  for (int i = 0; i < w.pages; ++i) {
    address[i] = reinterpret_cast<uint64_t>(tiles.get()) + i * page_bytes;
  }
  std::shuffle(address.begin(), address.end(), random);
  for (int i = 0; i < w.pages; ++i) {
    const int page = i % kDistinctPages;
    Check(cudaMemcpy(reinterpret_cast<void*>(address[i]), pages.data() + page * page_bytes,
                     page_bytes, cudaMemcpyHostToDevice),
          "pages");
    expected.insert(expected.end(), checksums.begin() + page * kHeads,
                    checksums.begin() + (page + 1) * kHeads);
  }
  const uint8_t changed = pages[w.pages / 2 % kDistinctPages * page_bytes + 17] ^ 0xa5;
  Check(cudaMemcpy(reinterpret_cast<void*>(address[w.pages / 2] + 17), &changed, 1,
                   cudaMemcpyHostToDevice),
        "change a byte");
  const Device<uint64_t> device_address = Upload(address);
  const Device<uint32_t> device_expected = Upload(expected);
  const Device<uint32_t> status = Upload(std::vector<uint32_t>(w.pages, 0));
  kernels::cuda::FetchParams p;
  p.tile_bytes = tile_bytes;
  p.pages = w.pages;
  p.tiles_per_layer = kHeads;
  p.to = device_address.get();  // and no `from`: tiles are verified where they lie
  p.checksums = device_expected.get();
  p.status = status.get();
  VerifyResult result;
  result.us = TimeGraph(
      [&](cudaStream_t stream) { Check(kernels::cuda::FetchTiles(p, stream), "verify"); });
  result.bytes = static_cast<double>(w.pages) * page_bytes;
  for (const uint32_t word : Download(status.get(), w.pages)) result.reported += word != 0;
  return result;
}

std::vector<VerifyWorkload> StandardVerifyWorkloads() { return {{1600}, {32768}}; }

}  // namespace crumb::bench
