// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
// The bytes of an evicted window do not depend on the launch: alone in a decode step, with hundreds
// of others at a prompt's end, with one layer or all of them, and on the CPU where the method is
// exact.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <string>
#include <tuple>

#include "kernels/bf16.h"
#include "kernels/cuda/evict/evict.h"
#include "kernels/quantize.h"
#include "kernels/tile_codec.h"
#include "tests/kernels/cuda/evict/evict_inputs.h"
#include "tests/kernels/cuda/random_inputs.h"

namespace crumb::kernels::cuda {
namespace {

constexpr int kDistinct = 4;  // distinct windows; a launch of more repeats them

struct WindowSetup {
  TileShape tile;
  Method method = Method::kOscar;
  int layers = 1;
  int heads = 2;
};

std::vector<float> HadamardMatrix(int dim) {
  std::vector<float> h(static_cast<size_t>(dim) * dim);
  for (int i = 0; i < dim; ++i) {
    for (int j = 0; j < dim; ++j) {
      const bool odd = std::popcount(static_cast<unsigned>(i & j)) % 2 != 0;
      h[i * dim + j] = (odd ? -1.0f : 1.0f) / std::sqrt(static_cast<float>(dim));
    }
  }
  return h;
}

class Windows {
 public:
  explicit Windows(const WindowSetup& setup) : s_(setup), matrices_(setup.layers * setup.heads) {
    std::mt19937 random(31);
    const int dim = s_.tile.head_dim;
    std::normal_distribution<float> normal;
    rows_.resize(size_t{kDistinct} * matrices_ * 2 * kEvictRing * dim);
    // Rows repeat some 60,000 values.
    std::vector<Bf16> values(60013);
    for (Bf16& x : values) x = Bf16FromFloat(normal(random));
    for (size_t i = 0; i < rows_.size(); ++i) rows_[i] = values[i * 7 % values.size()];
    for (int w = 0; w < kDistinct; ++w) begin_.push_back((17 * w + 60) % kEvictRing);
    // A few different matrices suffice; their order differs for each head and part.
    std::vector<float> pool[3];
    for (int i = 0; i < 3; ++i) {
      pool[i] = s_.method == Method::kHadamard ? HadamardMatrix(dim) : RandomRotation(dim, random);
    }
    for (size_t i = 0; i < 2 * matrices_; ++i) {
      rotation_.insert(rotation_.end(), pool[i % 3].begin(), pool[i % 3].end());
    }
    const std::vector<float> feedback = RandomFeedback(dim, random);
    for (size_t i = 0; i < 2 * matrices_; ++i) {
      feedback_.insert(feedback_.end(), feedback.begin(), feedback.end());
    }
    mean_ = RandomFloats(2 * matrices_ * dim, 0.3, random);
    Upload();
  }

  // Returns the tiles of windows first, first + 1, ... (modulo the distinct ones), of layers [0,
  // layers).
  std::vector<uint8_t> Evict(int first, int count, int layers, RotatePath path, int grid = 0) {
    const int dim = s_.tile.head_dim;
    const size_t page = size_t{1} * layers * s_.heads * s_.tile.int2_bytes();
    DeviceBuffer tiles(page * count);
    std::vector<uint64_t> from, to;
    std::vector<int32_t> begin;
    for (int i = 0; i < count; ++i) {
      const int w = (first + i) % kDistinct;
      from.push_back(device_rows_.address() + w * matrices_ * 4 * kEvictRing * dim);
      to.push_back(tiles.address() + i * page);
      begin.push_back(begin_[w]);
    }
    grid = std::max(grid, count);
    from.resize(grid, from[0]);  // unused entries point to valid memory
    to.resize(grid, to[0]);
    begin.resize(grid, 0);
    const DeviceBuffer ring(from), tile(to), slots(begin), number(std::vector<int32_t>{count}),
        status(std::vector<uint32_t>(grid, 0));
    EvictParams p;
    p.tile = s_.tile;
    p.method = s_.method;
    p.layers = layers;
    p.kv_heads = s_.heads;
    p.windows_max = grid;
    p.windows = number.as<int32_t>();
    p.ring_address = ring.as<uint64_t>();
    p.ring_begin = slots.as<int32_t>();
    p.tile_address = tile.as<uint64_t>();
    SetStrides(&p);
    p.k = Transform(0);
    p.v = Transform(1);
    p.status = status.as<uint32_t>();
    EXPECT_EQ(EvictWindows(p, nullptr, {.path = path}), cudaSuccess);
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    EXPECT_EQ(status.Download<uint32_t>(), std::vector<uint32_t>(grid, 0));
    return tiles.Download<uint8_t>();
  }

  // Returns the CPU's tile of (window, layer and head).
  std::vector<uint8_t> OnTheCpu(int w, size_t matrix) const {
    const int dim = s_.tile.head_dim;
    const std::vector<Bf16> window =
        WindowOfRing(&rows_[(w * matrices_ + matrix) * 2 * kEvictRing * dim], begin_[w], dim);
    alignas(128) uint8_t tile[16384];
    QuantizeParams q;
    q.shape = s_.tile;
    q.method = s_.method;
    q.k = window.data();
    q.v = window.data() + size_t{64} * dim;
    q.k_stride = q.v_stride = dim;
    for (const int value : {0, 1}) {
      RowTransform& t = value == 0 ? q.k_transform : q.v_transform;
      if (s_.method == Method::kNaive) continue;
      const size_t at = value * matrices_ + matrix;
      t = {rotation_.data() + at * dim * dim, mean_.data() + at * dim, 0.92f,
           s_.method == Method::kCrumb ? feedback_.data() + at * dim * dim : nullptr};
    }
    q.tile = tile;
    EXPECT_EQ(QuantizeTile(q), 0u);
    return {tile, tile + s_.tile.int2_bytes()};
  }

 private:
  void Upload() {
    device_rows_.Upload(rows_);
    constants_.Upload(rotation_, feedback_, mean_, s_.tile.head_dim);
  }
  EvictTransform Transform(int value) const {
    if (s_.method == Method::kNaive) return {};
    EvictTransform t = constants_.Of(value);
    t.clip = 0.92f;
    return t;
  }

  const WindowSetup s_;
  const size_t matrices_;
  std::vector<Bf16> rows_;
  std::vector<int32_t> begin_;
  std::vector<float> rotation_, feedback_, mean_;
  EvictConstants constants_;
  DeviceBuffer device_rows_;
};

constexpr TileShape kTiles[] = {{64, 128, 128}, {64, 128, 32}, {64, 64, 64}, {64, 256, 128}};
constexpr Method kMethods[] = {Method::kNaive, Method::kHadamard, Method::kOscar, Method::kCrumb};

// Returns whether page `page` of a launch begins with the first `bytes` bytes of `alone`.
bool Same(const std::vector<uint8_t>& launch, size_t page_bytes, size_t page,
          const std::vector<uint8_t>& alone, size_t bytes) {
  return std::memcmp(&launch[page * page_bytes], alone.data(), bytes) == 0;
}

class WindowBytes : public testing::TestWithParam<std::tuple<TileShape, Method>> {
 protected:
  // Evicts windows alone and in launches of `counts`, and expects the same bytes.
  void Compare(int layers, const std::vector<int>& counts) {
    WindowSetup setup;
    std::tie(setup.tile, setup.method) = GetParam();
    setup.layers = layers;
    Windows windows(setup);
    const size_t layer = setup.heads * setup.tile.int2_bytes(), page = layer * layers;
    for (const RotatePath path : {RotatePath::kAuto, RotatePath::kWarp}) {
      std::vector<std::vector<uint8_t>> alone;
      for (int w = 0; w < kDistinct; ++w) {
        alone.push_back(windows.Evict(w, 1, layers, path));
        // The launch has fewer layers and capacity for more windows.
        EXPECT_TRUE(Same(windows.Evict(w, 1, 1, path, 9), layer, 0, alone[w], layer))
            << "window " << w << ", one layer";
      }
      for (const int count : counts) {
        const std::vector<uint8_t> together = windows.Evict(2, count, layers, path);
        size_t differ = 0;
        for (int i = 0; i < count; ++i) {
          differ += !Same(together, page, i, alone[(2 + i) % kDistinct], page);
        }
        EXPECT_EQ(differ, 0u) << "path " << static_cast<int>(path) << ": " << layers << " layers, "
                              << count << " windows";
      }
      if (setup.method != Method::kNaive) continue;
      for (int w = 0; w < kDistinct; ++w) {
        EXPECT_TRUE(Same(alone[w], page, 0, windows.OnTheCpu(w, 0), setup.tile.int2_bytes()));
      }
    }
  }
};

// The counts are those of a decode step and of a prompt of some thousand tokens.
TEST_P(WindowBytes, AloneAndAmongOthers) {
  CRUMB_NEEDS_DEVICE();
  Compare(2, {2, 7, 64});
}

// There are more matrices than SMs.
TEST_P(WindowBytes, WithAllLayers) {
  CRUMB_NEEDS_DEVICE();
  Compare(72, {3, 20});
}

// There are many times more windows than all blocks process at once.
TEST_P(WindowBytes, InThousands) {
  CRUMB_NEEDS_DEVICE();
  Compare(1, {4000});
}

using Case = std::tuple<TileShape, Method>;

std::string NameOf(const testing::TestParamInfo<Case>& info) {
  const auto& [tile, method] = info.param;
  return "d" + std::to_string(tile.head_dim) + "_G" + std::to_string(tile.group_size) + "_" +
         std::string(MethodName(method));
}

INSTANTIATE_TEST_SUITE_P(Methods, WindowBytes,
                         testing::Combine(testing::ValuesIn(kTiles), testing::ValuesIn(kMethods)),
                         NameOf);

// The device agrees with the CPU: with Hadamard matrices as rotations at most 1e-5 of the codes
// differ, with the method `crumb` at most 1 % of the rows.
TEST(WindowBytesOnTheCpu, HadamardAndCrumbAgree) {
  CRUMB_NEEDS_DEVICE();
  for (const TileShape& tile : kTiles) {
    for (const Method method : {Method::kHadamard, Method::kCrumb}) {
      WindowSetup setup;
      setup.tile = tile;
      setup.method = method;
      setup.layers = 4;
      Windows windows(setup);
      const std::vector<uint8_t> got = windows.Evict(0, kDistinct, setup.layers, RotatePath::kAuto);
      const size_t matrices = size_t{1} * setup.layers * setup.heads;
      size_t rows = 0, codes = 0, differ = 0;
      for (int w = 0; w < kDistinct; ++w) {
        for (size_t m = 0; m < matrices; ++m) {
          const uint8_t* tile_got = &got[(w * matrices + m) * tile.int2_bytes()];
          const std::vector<uint8_t> expected = windows.OnTheCpu(w, m);
          for (int row = 0; row < 128; ++row) {
            const TilePart part = row < 64 ? TilePart::kKey : TilePart::kValue;
            ++rows;
            differ += RowDiffers(tile, tile_got, expected.data(), part, row % 64);
            for (int i = 0; i < tile.head_dim; ++i) {
              codes += ReadCode(tile, tile_got, part, row % 64, i) !=
                       ReadCode(tile, expected.data(), part, row % 64, i);
            }
          }
        }
      }
      std::printf("%s d %d G %d: %zu of %zu rows differ, %zu codes\n",
                  std::string(MethodName(method)).c_str(), tile.head_dim, tile.group_size, differ,
                  rows, codes);
      if (method == Method::kCrumb) {
        EXPECT_LE(static_cast<double>(differ), 0.01 * static_cast<double>(rows));
      } else {
        EXPECT_LE(static_cast<double>(codes), 1e-5 * static_cast<double>(rows) * tile.head_dim + 1);
      }
    }
  }
}

}  // namespace
}  // namespace crumb::kernels::cuda
