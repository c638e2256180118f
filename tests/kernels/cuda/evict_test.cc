// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/evict.h"

#include <bit>
#include <cstdio>
#include <limits>
#include <random>

#include "kernels/bf16.h"
#include "kernels/quantize.h"
#include "kernels/tile_codec.h"
#include "tests/kernels/cuda/decode_case.h"
#include "tests/kernels/cuda/device_buffer.h"

namespace crumb::kernels::cuda {
namespace {

enum class Rows { kNormal, kOutliers, kExtreme };

struct EvictOptions {
  TileShape tile;
  int layers = 2;
  int kv_heads = 2;
  int windows = 3;
  bool rotated = true;
  bool centred = true;
  float k_clip = 0.96f;
  float v_clip = 0.92f;
  Rows rows = Rows::kNormal;
  uint32_t seed = 1;
};

// Windows of all layers and heads on host and device, quantized by both.
class EvictCase {
 public:
  explicit EvictCase(const EvictOptions& options) : o_(options), random_(options.seed) {
    const size_t matrices = static_cast<size_t>(o_.layers) * o_.kv_heads;
    const int dim = o_.tile.head_dim;
    rows_.resize(matrices * o_.windows * 2 * kRing * dim);
    FillRows();
    device_rows_.Upload(rows_);
    for (size_t i = 0; i < 2 * matrices; ++i) {
      const std::vector<float> r = RandomRotation(dim, random_);
      rotation_.insert(rotation_.end(), r.begin(), r.end());
    }
    std::normal_distribution<float> normal(0.0f, 0.3f);
    mean_.resize(2 * matrices * dim);
    for (float& m : mean_) m = normal(random_);
    device_rotation_.Upload(rotation_);
    device_mean_.Upload(mean_);
    tiles_.Allocate(matrices * o_.windows * o_.tile.int2_bytes());
    std::vector<uint64_t> ring, tile;
    for (int w = 0; w < o_.windows; ++w) {
      ring.push_back(device_rows_.address() + w * matrices * 4 * kRing * dim);
      tile.push_back(tiles_.address() + w * matrices * o_.tile.int2_bytes());
      begin_.push_back(static_cast<int>(random_() % kRing));
    }
    ring_.Upload(ring);
    tile_.Upload(tile);
    device_begin_.Upload(begin_);
    count_.Upload(std::vector<int32_t>{o_.windows});
    status_.Upload(std::vector<uint32_t>(o_.windows, 0));
  }

  void Run(int windows_max) {
    const size_t matrices = static_cast<size_t>(o_.layers) * o_.kv_heads;
    const int dim = o_.tile.head_dim;
    EvictParams p;
    p.tile = o_.tile;
    p.layers = o_.layers;
    p.kv_heads = o_.kv_heads;
    p.windows_max = windows_max;
    p.windows = count_.as<int32_t>();
    p.ring_address = ring_.as<uint64_t>();
    p.ring_begin = device_begin_.as<int32_t>();
    p.ring_capacity = kRing;
    p.ring_head_stride = 4 * kRing * dim;
    p.ring_layer_stride = p.ring_head_stride * o_.kv_heads;
    p.ring_token_stride = 2 * dim;
    p.ring_v_offset = 2 * kRing * dim;
    p.tile_address = tile_.as<uint64_t>();
    p.tile_head_stride = static_cast<int64_t>(o_.tile.int2_bytes());
    p.tile_layer_stride = p.tile_head_stride * o_.kv_heads;
    if (o_.rotated) {
      p.k.rotation = device_rotation_.as<float>();
      p.v.rotation = device_rotation_.as<float>() + matrices * dim * dim;
    }
    if (o_.centred) {
      p.k.mean = device_mean_.as<float>();
      p.v.mean = device_mean_.as<float>() + matrices * dim;
    }
    p.k.clip = o_.k_clip;
    p.v.clip = o_.v_clip;
    p.status = status_.as<uint32_t>();
    ASSERT_CUDA(EvictWindows(p, nullptr));
    ASSERT_CUDA(cudaDeviceSynchronize());
    device_tiles_ = tiles_.Download<uint8_t>();
  }

  // The CPU's tiles in the same order, and its status per window.
  std::vector<uint8_t> Expected(std::vector<uint32_t>* status) const {
    const size_t matrices = static_cast<size_t>(o_.layers) * o_.kv_heads;
    const int dim = o_.tile.head_dim;
    std::vector<uint8_t> tiles(device_tiles_.size());
    status->assign(o_.windows, 0);
    for (int w = 0; w < o_.windows; ++w) {
      for (size_t m = 0; m < matrices; ++m) {
        const Bf16* from = rows_.data() + (w * matrices + m) * 2 * kRing * dim;
        std::vector<Bf16> window(2 * 64 * dim);
        for (int t = 0; t < 64; ++t) {
          const int slot = (begin_[w] + t) % kRing;
          std::copy_n(from + slot * dim, dim, window.begin() + t * dim);
          std::copy_n(from + (kRing + slot) * dim, dim, window.begin() + (64 + t) * dim);
        }
        alignas(128) uint8_t tile[16384];
        QuantizeParams p;
        p.shape = o_.tile;
        p.k = window.data();
        p.v = window.data() + 64 * dim;
        p.k_stride = p.v_stride = dim;
        if (o_.rotated) {
          p.k_transform.rotation = rotation_.data() + m * dim * dim;
          p.v_transform.rotation = rotation_.data() + (matrices + m) * dim * dim;
        }
        if (o_.centred) {
          p.k_transform.mean = mean_.data() + m * dim;
          p.v_transform.mean = mean_.data() + (matrices + m) * dim;
        }
        p.k_transform.clip = o_.k_clip;
        p.v_transform.clip = o_.v_clip;
        p.tile = tile;
        (*status)[w] |= QuantizeTile(p);
        std::copy_n(tile, o_.tile.int2_bytes(),
                    tiles.begin() + (w * matrices + m) * o_.tile.int2_bytes());
      }
    }
    return tiles;
  }

  const std::vector<uint8_t>& tiles() const { return device_tiles_; }
  std::vector<uint32_t> status() const { return status_.Download<uint32_t>(); }

 private:
  static constexpr int kRing = 71;

  void FillRows() {
    std::normal_distribution<float> normal;
    const int dim = o_.tile.head_dim;
    for (size_t row = 0; row < rows_.size() / dim; ++row) {
      Bf16* x = rows_.data() + row * dim;
      for (int i = 0; i < dim; ++i) x[i] = Bf16FromFloat(normal(random_));
      if (o_.rows == Rows::kOutliers && row % 3 == 0) x[random_() % dim] = Bf16FromFloat(1e4f);
      if (o_.rows == Rows::kExtreme) MakeExtreme(row % 9, x);
    }
  }
  void MakeExtreme(int kind, Bf16* x) {
    const int dim = o_.tile.head_dim;
    for (int i = 0; i < dim; ++i) {
      const float sign = random_() % 2 == 0 ? 1.0f : -1.0f;
      if (kind == 0) x[i] = Bf16FromFloat(-2.5f);
      if (kind == 1) x[i] = {};
      if (kind == 2) x[i] = Bf16FromFloat(sign * 1e-39f);
      if (kind == 3) x[i] = Bf16FromFloat(sign * 65504.0f);
      if (kind == 4) x[i] = Bf16FromFloat(sign * static_cast<float>(random_() % 4));
      if (kind == 5) x[i] = Bf16FromFloat(sign * 1e30f);
    }
    if (kind == 6) x[random_() % dim] = Bf16FromFloat(std::numeric_limits<float>::quiet_NaN());
    if (kind == 7) x[random_() % dim] = Bf16FromFloat(std::numeric_limits<float>::infinity());
  }

  const EvictOptions o_;
  std::mt19937 random_;
  std::vector<Bf16> rows_;
  std::vector<float> rotation_, mean_;
  std::vector<int32_t> begin_;
  std::vector<uint8_t> device_tiles_;
  DeviceBuffer device_rows_, device_rotation_, device_mean_, tiles_, ring_, tile_, device_begin_,
      count_, status_;
};

const TileShape kShapes[] = {
    {64, 128, 128}, {64, 128, 64}, {64, 128, 32}, {64, 64, 64}, {64, 64, 32}};

TEST(EvictWindows, NaiveIsTheCpuBitForBit) {
  CRUMB_NEEDS_DEVICE();
  for (const TileShape& shape : kShapes) {
    for (const Rows rows : {Rows::kNormal, Rows::kOutliers, Rows::kExtreme}) {
      for (const float clip : {0.0f, 0.96f, 0.5f}) {
        EvictOptions options;
        options.tile = shape;
        options.rotated = options.centred = false;
        options.k_clip = options.v_clip = clip;
        options.rows = rows;
        options.windows = 5;
        EvictCase run(options);
        run.Run(7);
        std::vector<uint32_t> status;
        const std::vector<uint8_t> expected = run.Expected(&status);
        size_t different = 0;
        for (size_t i = 0; i < expected.size(); ++i) different += expected[i] != run.tiles()[i];
        EXPECT_EQ(different, 0u) << "d " << shape.head_dim << " G " << shape.group_size << " rows "
                                 << static_cast<int>(rows) << " clip " << clip;
        EXPECT_EQ(run.status(), status);
      }
    }
  }
}

TEST(EvictWindows, RotatedCodesAgreeWithTheCpu) {
  CRUMB_NEEDS_DEVICE();
  for (const TileShape& shape : kShapes) {
    for (const Rows rows : {Rows::kNormal, Rows::kOutliers}) {
      EvictOptions options;
      options.tile = shape;
      options.rows = rows;
      options.layers = 3;
      options.windows = 12;
      EvictCase run(options);
      run.Run(options.windows);
      std::vector<uint32_t> status;
      const std::vector<uint8_t> expected = run.Expected(&status);
      const size_t tile_bytes = shape.int2_bytes(), code_bytes = 2 * shape.code_bytes();
      size_t different = 0, codes = 0;
      for (size_t i = 0; i < expected.size(); ++i) {
        if (i % tile_bytes >= code_bytes) continue;
        uint8_t bits = expected[i] ^ run.tiles()[i];
        for (; bits != 0; bits >>= 2) different += (bits & 3) != 0;
        codes += 4;
      }
      std::printf("d %d G %d: %zu of %zu codes differ, error %.1e\n", shape.head_dim,
                  shape.group_size, different, codes,
                  static_cast<double>(different) / static_cast<double>(codes));
      EXPECT_LE(static_cast<double>(different), 1e-5 * static_cast<double>(codes) + 1);
      EXPECT_EQ(run.status(), status);
    }
  }
}

TEST(EvictWindows, SameBytesOnEveryRun) {
  CRUMB_NEEDS_DEVICE();
  EvictCase run(EvictOptions{});
  run.Run(3);
  const std::vector<uint8_t> first = run.tiles();
  run.Run(100);  // another grid
  EXPECT_EQ(run.tiles(), first);
}

}  // namespace
}  // namespace crumb::kernels::cuda
