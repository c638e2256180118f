// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/evict.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <limits>
#include <memory>
#include <random>

#include "kernels/bf16.h"
#include "kernels/fp16.h"
#include "kernels/quantize.h"
#include "kernels/tile_codec.h"
#include "tests/kernels/cuda/crc32c_oracle.h"
#include "tests/kernels/cuda/device_buffer.h"
#include "tests/kernels/cuda/random_inputs.h"

namespace crumb::kernels::cuda {
namespace {

enum class Rows { kNormal, kOutliers, kExtreme };

struct EvictOptions {
  TileShape tile;
  Method method = Method::kOscar;
  RowType row_type = RowType::kBf16;
  RotatePath path = RotatePath::kAuto;
  int layers = 2;
  int kv_heads = 2;
  int windows = 3;
  int position_blocks = 1;
  bool rotated = true;
  bool centred = true;
  bool feedback = true;  // kCrumb
  float k_clip = 0.96f;
  float v_clip = 0.92f;
  Rows rows = Rows::kNormal;
  uint32_t seed = 1;
};

// Strictly upper, entries as a damped factorization gives them.
std::vector<float> RandomFeedback(int dim, std::mt19937& random) {
  std::vector<float> feedback(static_cast<size_t>(dim) * dim, 0.0f);
  std::normal_distribution<float> normal;
  for (int i = 0; i < dim; ++i) {
    for (int j = i + 1; j < dim; ++j) feedback[i * dim + j] = 0.3f / (1 + j - i) * normal(random);
  }
  return feedback;
}

// Windows of all layers and heads on host and device, quantized by both. Every matrix and window
// has data of its own.
class EvictCase {
 public:
  explicit EvictCase(const EvictOptions& options)
      : o_(options), matrices_(options.layers * options.kv_heads), random_(options.seed) {
    const int dim = o_.tile.head_dim;
    rows_.resize(matrices_ * o_.windows * 2 * kRing * dim);
    FillRows();
    for (size_t i = 0; i < 2 * matrices_; ++i) {
      const std::vector<float> r = RandomRotation(dim, random_), u = RandomFeedback(dim, random_);
      rotation_.insert(rotation_.end(), r.begin(), r.end());
      feedback_.insert(feedback_.end(), u.begin(), u.end());
    }
    std::normal_distribution<float> normal(0.0f, 0.3f);
    mean_.resize(2 * matrices_ * o_.position_blocks * dim);
    for (float& m : mean_) m = normal(random_);
    Upload();
  }

  void Run(int windows_max) {
    tiles_.Fill(0xff);
    sums_.Fill(0xff);
    status_.Upload(std::vector<uint32_t>(o_.windows, 0));
    EvictParams p = Params();
    p.windows_max = windows_max;
    ASSERT_CUDA(EvictWindows(p, nullptr));
    ASSERT_CUDA(cudaDeviceSynchronize());
    device_tiles_ = tiles_.Download<uint8_t>();
  }

  EvictParams Params() const {
    const int dim = o_.tile.head_dim;
    EvictParams p;
    p.tile = o_.tile;
    p.method = o_.method;
    p.row_type = o_.row_type;
    p.path = o_.path;
    p.layers = o_.layers;
    p.kv_heads = o_.kv_heads;
    p.windows_max = o_.windows;
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
    p.k = DeviceTransform(0);
    p.v = DeviceTransform(1);
    p.position_block = device_block_.as<int32_t>();
    p.position_blocks = o_.position_blocks;
    p.status = status_.as<uint32_t>();
    p.sums = sums_.as<uint32_t>();
    p.workspace = workspace_.as<void>();
    return p;
  }

  // The rows of one tile in order: K, then V.
  std::vector<Bf16> WindowOf(int w, size_t m) const {
    const int dim = o_.tile.head_dim;
    const Bf16* from = rows_.data() + (w * matrices_ + m) * 2 * kRing * dim;
    std::vector<Bf16> window(2 * 64 * dim);
    for (int t = 0; t < 64; ++t) {
      const int slot = (begin_[w] + t) % kRing;
      std::copy_n(from + slot * dim, dim, window.begin() + t * dim);
      std::copy_n(from + (kRing + slot) * dim, dim, window.begin() + (64 + t) * dim);
    }
    return window;
  }

  RowTransform HostTransform(int value, int w, size_t m) const {
    const int dim = o_.tile.head_dim;
    RowTransform t;
    const size_t matrix = value * matrices_ + m;
    if (o_.rotated) t.rotation = rotation_.data() + matrix * dim * dim;
    if (o_.centred) t.mean = mean_.data() + (matrix * o_.position_blocks + block_[w]) * dim;
    if (o_.method == Method::kCrumb && o_.feedback) {
      t.feedback = feedback_.data() + matrix * dim * dim;
    }
    t.clip = value == 0 ? o_.k_clip : o_.v_clip;
    return t;
  }

  // The CPU's tiles in the same order, and its status per window.
  std::vector<uint8_t> Expected(std::vector<uint32_t>* status) const {
    const int dim = o_.tile.head_dim;
    std::vector<uint8_t> tiles(device_tiles_.size());
    status->assign(o_.windows, 0);
    for (int w = 0; w < o_.windows; ++w) {
      for (size_t m = 0; m < matrices_; ++m) {
        const std::vector<Bf16> window = WindowOf(w, m);
        alignas(128) uint8_t tile[16384];
        QuantizeParams p;
        p.shape = o_.tile;
        p.method = o_.method;
        p.k = window.data();
        p.v = window.data() + 64 * dim;
        p.k_stride = p.v_stride = dim;
        p.k_transform = HostTransform(0, w, m);
        p.v_transform = HostTransform(1, w, m);
        p.tile = tile;
        (*status)[w] |= QuantizeTile(p);
        std::copy_n(tile, o_.tile.int2_bytes(),
                    tiles.begin() + (w * matrices_ + m) * o_.tile.int2_bytes());
      }
    }
    return tiles;
  }

  std::vector<Bf16>& rows() { return rows_; }
  void Upload() {
    std::vector<uint64_t> ring, tile;
    UploadRows();
    const int dim = o_.tile.head_dim;
    DeviceBuffer plain;
    plain.Upload(rotation_);
    const int count = static_cast<int>(2 * matrices_);
    device_rotation_.Allocate(count * EvictRotationBytes(dim));
    ASSERT_CUDA(PrepareEvictRotation(plain.as<float>(), dim, count, o_.row_type,
                                     device_rotation_.as<EvictRotation>(), nullptr));
    ASSERT_CUDA(cudaDeviceSynchronize());
    plain.Upload(feedback_);
    device_feedback_.Allocate(count * EvictFeedbackBytes(dim));
    ASSERT_CUDA(PrepareEvictFeedback(plain.as<float>(), dim, count,
                                     device_feedback_.as<EvictFeedback>(), nullptr));
    ASSERT_CUDA(cudaDeviceSynchronize());
    device_mean_.Upload(mean_);
    tiles_.Allocate(matrices_ * o_.windows * o_.tile.int2_bytes());
    for (int w = 0; w < o_.windows; ++w) {
      ring.push_back(device_rows_.address() + w * matrices_ * 4 * kRing * dim);
      tile.push_back(tiles_.address() + w * matrices_ * o_.tile.int2_bytes());
      begin_.push_back(static_cast<int>(random_() % kRing));
      block_.push_back(static_cast<int>(random_() % o_.position_blocks));
    }
    ring_.Upload(ring);
    tile_.Upload(tile);
    device_begin_.Upload(begin_);
    device_block_.Upload(block_);
    count_.Upload(std::vector<int32_t>{o_.windows});
    status_.Upload(std::vector<uint32_t>(o_.windows, 0));
    sums_.Allocate(4 * matrices_ * o_.windows);
    workspace_.Upload(std::vector<uint64_t>(matrices_ * 128, 0));
  }
  void UploadRows() {
    std::vector<Bf16> rows = rows_;
    if (o_.row_type == RowType::kFp16) {
      for (Bf16& x : rows) {
        bool saturated = false;
        x.bits = Fp16FromFloat(Bf16ToFloat(x), &saturated);
      }
    }
    device_rows_.Upload(rows);
  }

  size_t matrices() const { return matrices_; }
  const std::vector<uint8_t>& tiles() const { return device_tiles_; }
  std::vector<uint32_t> status() const { return status_.Download<uint32_t>(); }
  std::vector<uint32_t> sums() const { return sums_.Download<uint32_t>(); }
  std::vector<uint64_t> workspace() const { return workspace_.Download<uint64_t>(); }

  static constexpr int kRing = 71;

 private:
  EvictTransform DeviceTransform(int value) const {
    const int dim = o_.tile.head_dim;
    EvictTransform t;
    const size_t matrix = value * matrices_;
    if (o_.rotated) {
      t.rotation = reinterpret_cast<const EvictRotation*>(device_rotation_.as<char>() +
                                                          matrix * EvictRotationBytes(dim));
    }
    if (o_.centred) t.mean = device_mean_.as<float>() + matrix * o_.position_blocks * dim;
    if (o_.feedback) {
      t.feedback = reinterpret_cast<const EvictFeedback*>(device_feedback_.as<char>() +
                                                          matrix * EvictFeedbackBytes(dim));
    }
    t.clip = value == 0 ? o_.k_clip : o_.v_clip;
    return t;
  }

  void FillRows() {
    std::normal_distribution<float> normal;
    const int dim = o_.tile.head_dim;
    for (size_t row = 0; row < rows_.size() / dim; ++row) {
      Bf16* x = rows_.data() + row * dim;
      for (int i = 0; i < dim; ++i) {
        x[i] = Bf16FromFloat(normal(random_));
        // Exact as a half too.
        if (o_.row_type == RowType::kFp16 && std::abs(Bf16ToFloat(x[i])) < 1e-3f) x[i] = {};
      }
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
  const size_t matrices_;
  std::mt19937 random_;
  std::vector<Bf16> rows_;
  std::vector<float> rotation_, mean_, feedback_;
  std::vector<int32_t> begin_, block_;
  std::vector<uint8_t> device_tiles_;
  DeviceBuffer device_rows_, device_rotation_, device_feedback_, device_mean_, tiles_, ring_, tile_,
      device_begin_, device_block_, count_, status_, sums_, workspace_;
};

size_t DifferentCodes(const TileShape& shape, const std::vector<uint8_t>& a,
                      const std::vector<uint8_t>& b, size_t* codes) {
  size_t different = 0;
  *codes = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    if (i % shape.int2_bytes() >= 2 * shape.code_bytes()) continue;
    uint8_t bits = a[i] ^ b[i];
    for (; bits != 0; bits >>= 2) different += (bits & 3) != 0;
    *codes += 4;
  }
  return different;
}

// y of one row in double precision.
std::vector<double> ExactRow(const Bf16* x, int dim, const RowTransform& t) {
  std::vector<double> y(dim, 0.0);
  for (int i = 0; i < dim; ++i) {
    const double value = Bf16ToFloat(x[i]);
    if (t.rotation == nullptr) {
      y[i] += value;
      continue;
    }
    for (int j = 0; j < dim; ++j) y[j] += value * t.rotation[i * dim + j];
  }
  for (int j = 0; t.mean != nullptr && j < dim; ++j) y[j] -= t.mean[j];
  return y;
}

double Dequantized(const TileShape& shape, const uint8_t* tile, TilePart part, int t, int channel) {
  const RowMeta meta = ReadMeta(shape, tile, part, t, channel / shape.group_size);
  return Fp16ToFloat(meta.minimum) +
         Fp16ToFloat(meta.scale) * ReadCode(shape, tile, part, t, channel);
}

// |(y - z) (I + U)|^2 of one row.
double WeightedError(const TileShape& shape, const uint8_t* tile, TilePart part, int t,
                     const std::vector<double>& y, const float* feedback) {
  const int dim = shape.head_dim;
  std::vector<double> error(dim);
  for (int j = 0; j < dim; ++j) error[j] = y[j] - Dequantized(shape, tile, part, t, j);
  std::vector<double> weighted = error;
  for (int i = 0; i < dim; ++i) {
    for (int j = i + 1; j < dim; ++j) weighted[j] += error[i] * feedback[i * dim + j];
  }
  double sum = 0.0;
  for (const double w : weighted) sum += w * w;
  return sum;
}

bool CodesDiffer(const TileShape& shape, const uint8_t* a, const uint8_t* b, TilePart part, int t) {
  for (int i = 0; i < shape.head_dim; ++i) {
    if (ReadCode(shape, a, part, t, i) != ReadCode(shape, b, part, t, i)) return true;
  }
  return false;
}

bool RowDiffers(const TileShape& shape, const uint8_t* a, const uint8_t* b, TilePart part, int t) {
  for (int y = 0; y < shape.groups(); ++y) {
    const RowMeta one = ReadMeta(shape, a, part, t, y), other = ReadMeta(shape, b, part, t, y);
    if (one.scale != other.scale || one.minimum != other.minimum) return true;
  }
  return CodesDiffer(shape, a, b, part, t);
}

const TileShape kShapes[] = {{64, 128, 128}, {64, 128, 64},  {64, 128, 32}, {64, 64, 64},
                             {64, 64, 32},   {64, 256, 128}, {64, 256, 64}, {64, 256, 32}};
// The first tile of the last run.
std::vector<uint8_t> DeviceTile(const EvictParams& p, size_t bytes) {
  std::vector<uint8_t> tile(bytes);
  uint64_t address = 0;
  EXPECT_EQ(cudaMemcpy(&address, p.tile_address, 8, cudaMemcpyDeviceToHost), cudaSuccess);
  EXPECT_EQ(cudaMemcpy(tile.data(), reinterpret_cast<const void*>(address), bytes,
                       cudaMemcpyDeviceToHost),
            cudaSuccess);
  return tile;
}

const RotatePath kPaths[] = {RotatePath::kAuto, RotatePath::kWarp};

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
    for (const RotatePath path : kPaths) {
      for (const RowType type : {RowType::kBf16, RowType::kFp16}) {
        EvictOptions options;
        options.tile = shape;
        options.path = path;
        options.row_type = type;
        options.rows = type == RowType::kBf16 ? Rows::kOutliers : Rows::kNormal;
        options.layers = 3;
        options.windows = 12;
        options.position_blocks = 3;
        EvictCase run(options);
        run.Run(options.windows);
        std::vector<uint32_t> status;
        const std::vector<uint8_t> expected = run.Expected(&status);
        size_t codes = 0;
        const size_t different = DifferentCodes(shape, expected, run.tiles(), &codes);
        std::printf("d %d G %d path %d type %d: %zu of %zu codes differ, error %.1e\n",
                    shape.head_dim, shape.group_size, static_cast<int>(path),
                    static_cast<int>(type), different, codes,
                    static_cast<double>(different) / static_cast<double>(codes));
        EXPECT_LE(static_cast<double>(different), 1e-5 * static_cast<double>(codes) + 1);
        EXPECT_EQ(run.status(), status);
      }
    }
  }
}

// More matrices than any GPU has multiprocessors: blocks go from one to the next.
TEST(EvictWindows, BlocksGoFromMatrixToMatrix) {
  CRUMB_NEEDS_DEVICE();
  for (const int windows : {1, 5}) {
    EvictOptions options;
    options.tile = {64, 64, 64};
    options.layers = 60;
    options.windows = windows;
    EvictCase run(options);
    run.Run(windows);
    std::vector<uint32_t> status;
    const std::vector<uint8_t> expected = run.Expected(&status);
    size_t codes = 0;
    const size_t different = DifferentCodes(options.tile, expected, run.tiles(), &codes);
    EXPECT_LE(static_cast<double>(different), 1e-5 * static_cast<double>(codes) + 1);
    EXPECT_EQ(run.status(), status);
  }
}

// At most 1 % of rows differ, and the errors that count are as large as the CPU's.
TEST(EvictWindows, CrumbAgreesWithTheCpu) {
  CRUMB_NEEDS_DEVICE();
  for (const TileShape& shape : kShapes) {
    for (const RotatePath path : kPaths) {
      EvictOptions options;
      options.tile = shape;
      options.method = Method::kCrumb;
      options.path = path;
      options.k_clip = options.v_clip = 0.92f;
      options.rows = Rows::kOutliers;
      options.windows = shape.head_dim == 128 ? 16 : 6;
      options.position_blocks = 2;
      EvictCase run(options);
      run.Run(options.windows);
      std::vector<uint32_t> status;
      const std::vector<uint8_t> expected = run.Expected(&status);
      size_t different = 0, in_codes = 0, rows = 0;
      double error = 0.0, expected_error = 0.0;
      const int dim = shape.head_dim;
      for (int w = 0; w < options.windows; ++w) {
        for (size_t m = 0; m < run.matrices(); ++m) {
          const std::vector<Bf16> window = run.WindowOf(w, m);
          const size_t at = (w * run.matrices() + m) * shape.int2_bytes();
          const uint8_t *got = run.tiles().data() + at, *want = expected.data() + at;
          for (int row = 0; row < 128; ++row) {
            const TilePart part = row < 64 ? TilePart::kKey : TilePart::kValue;
            const RowTransform transform = run.HostTransform(row / 64, w, m);
            different += RowDiffers(shape, got, want, part, row % 64);
            in_codes += CodesDiffer(shape, got, want, part, row % 64);
            ++rows;
            const std::vector<double> y = ExactRow(&window[row * dim], dim, transform);
            error += WeightedError(shape, got, part, row % 64, y, transform.feedback);
            expected_error += WeightedError(shape, want, part, row % 64, y, transform.feedback);
          }
        }
      }
      std::printf(
          "crumb d %d G %d path %d: %zu of %zu rows differ, %zu of them in codes, weighted error "
          "%.5f of the CPU's, error %.1e\n",
          dim, shape.group_size, static_cast<int>(path), different, rows, in_codes,
          error / expected_error, static_cast<double>(different) / rows);
      EXPECT_LE(static_cast<double>(different), 0.01 * static_cast<double>(rows));
      EXPECT_NEAR(error / expected_error, 1.0, 2e-3);
      EXPECT_EQ(run.status(), status);
    }
  }
}

// Without feedback and rotation nothing is left to differ in but the last bit of a ratio.
TEST(EvictWindows, CrumbWithoutConstantsAgreesWithTheCpu) {
  CRUMB_NEEDS_DEVICE();
  for (const Rows rows : {Rows::kNormal, Rows::kExtreme}) {
    EvictOptions options;
    options.method = Method::kCrumb;
    options.rotated = options.centred = options.feedback = false;
    options.rows = rows;
    options.windows = 18;
    EvictCase run(options);
    run.Run(options.windows);
    std::vector<uint32_t> status;
    const std::vector<uint8_t> expected = run.Expected(&status);
    size_t codes = 0;
    const size_t different = DifferentCodes(options.tile, expected, run.tiles(), &codes);
    EXPECT_LE(different, codes / 2000) << "rows " << static_cast<int>(rows);
    EXPECT_EQ(run.status(), status);
  }
}

// Rows of 11 bits, which the CPU has no type for, against double precision.
TEST(EvictWindows, HalfRowsKeepTheirBits) {
  CRUMB_NEEDS_DEVICE();
  EvictOptions options;
  options.row_type = RowType::kFp16;
  options.centred = false;
  options.k_clip = options.v_clip = 0.0f;
  EvictCase run(options);
  std::mt19937 random(7);
  std::vector<uint16_t> halves(run.rows().size());
  std::normal_distribution<float> normal;
  bool saturated = false;
  for (uint16_t& h : halves) h = Fp16FromFloat(normal(random), &saturated);
  const DeviceBuffer rows(halves);
  const std::vector<uint64_t> ring = [&] {
    std::vector<uint64_t> addresses;
    const size_t bytes = 2 * halves.size() / options.windows;
    for (int w = 0; w < options.windows; ++w) addresses.push_back(rows.address() + w * bytes);
    return addresses;
  }();
  const DeviceBuffer device_ring(ring);
  EvictParams p = run.Params();
  p.ring_address = device_ring.as<uint64_t>();
  const DeviceBuffer begin(std::vector<int32_t>(options.windows, 0));
  p.ring_begin = begin.as<int32_t>();
  ASSERT_CUDA(EvictWindows(p, nullptr));
  const std::vector<uint8_t> tile = DeviceTile(p, options.tile.int2_bytes());
  const RowTransform transform = run.HostTransform(0, 0, 0);
  for (int t = 0; t < 64; ++t) {
    const RowMeta meta = ReadMeta(options.tile, tile.data(), TilePart::kKey, t, 0);
    const double scale = Fp16ToFloat(meta.scale), minimum = Fp16ToFloat(meta.minimum);
    for (int j = 0; j < 128; ++j) {
      double y = 0.0;
      for (int i = 0; i < 128; ++i) {
        y +=
            static_cast<double>(Fp16ToFloat(halves[t * 128 + i])) * transform.rotation[i * 128 + j];
      }
      const double z = Dequantized(options.tile, tile.data(), TilePart::kKey, t, j);
      ASSERT_LE(std::abs(y - z), 0.5 * scale + 1e-3 * (std::abs(minimum) + scale)) << t << " " << j;
    }
  }
}

TEST(EvictWindows, RowsThatAreNotFiniteDoNotSpread) {
  CRUMB_NEEDS_DEVICE();
  for (const Method method : {Method::kOscar, Method::kCrumb}) {
    EvictOptions options;
    options.method = method;
    EvictCase run(options);
    run.Run(options.windows);
    const std::vector<uint8_t> clean = run.tiles();
    EXPECT_EQ(run.status(), std::vector<uint32_t>(options.windows, 0));
    std::mt19937 random(3);
    // Row `slot` of the first matrix's K ring, second window.
    const int dim = options.tile.head_dim, slot = 30;
    Bf16* row = run.rows().data() + (run.matrices() * 2 * EvictCase::kRing + slot) * dim;
    for (const uint16_t bits : {0x7f80, 0xff80, 0x7fc0, 0xffff}) {
      const Bf16 was = row[random() % dim];
      Bf16& at = row[random() % dim];
      const Bf16 before = at;
      at.bits = bits;
      run.UploadRows();
      run.Run(options.windows);
      EXPECT_EQ(run.status(), (std::vector<uint32_t>{0, kStatusNonFinite, 0}));
      int different = 0;
      for (int w = 0; w < options.windows; ++w) {
        for (size_t m = 0; m < run.matrices(); ++m) {
          const size_t tile = (w * run.matrices() + m) * options.tile.int2_bytes();
          for (int t = 0; t < 128; ++t) {
            const TilePart part = t < 64 ? TilePart::kKey : TilePart::kValue;
            if (!RowDiffers(options.tile, clean.data() + tile, run.tiles().data() + tile, part,
                            t % 64)) {
              continue;
            }
            ++different;
            EXPECT_TRUE(w == 1 && m == 0 && t < 64);
            for (int i = 0; i < dim; ++i) {
              EXPECT_EQ(Dequantized(options.tile, run.tiles().data() + tile, part, t, i), 0.0);
            }
          }
        }
      }
      EXPECT_EQ(different, 1) << "bits " << bits << " was " << was.bits;
      at = before;
    }
  }
}

// No input gives a tile that is not finite, with either method, and the status is the CPU's.
TEST(EvictWindows, ExtremeRowsStayFiniteAndAreReported) {
  CRUMB_NEEDS_DEVICE();
  for (const TileShape& shape : kShapes) {
    for (const Method method : {Method::kOscar, Method::kCrumb}) {
      EvictOptions options;
      options.tile = shape;
      options.method = method;
      options.rows = Rows::kExtreme;
      options.windows = 4;
      EvictCase run(options);
      run.Run(options.windows);
      std::vector<uint32_t> status;
      run.Expected(&status);
      EXPECT_EQ(run.status(), status);
      for (size_t at = 0; at < run.tiles().size(); at += shape.int2_bytes()) {
        for (size_t i = 2 * shape.code_bytes(); i < shape.int2_bytes(); i += 2) {
          uint16_t half;
          std::memcpy(&half, &run.tiles()[at + i], 2);
          ASSERT_LT(half & 0x7fff, 0x7c00);
        }
      }
    }
  }
}

TEST(EvictWindows, ConstantRowsAreExactToFp16) {
  CRUMB_NEEDS_DEVICE();
  for (const Method method : {Method::kOscar, Method::kCrumb}) {
    for (const float value : {0.0f, 1.0f, -3.140625f, 1024.0f, 0x1p-24f, -65280.0f}) {
      EvictOptions options;
      options.method = method;
      options.rotated = options.centred = false;
      EvictCase run(options);
      for (Bf16& x : run.rows()) x = Bf16FromFloat(value);
      run.UploadRows();
      run.Run(options.windows);
      EXPECT_EQ(run.status(), std::vector<uint32_t>(options.windows, 0));
      for (int t = 0; t < 64; ++t) {
        for (int i = 0; i < 128; ++i) {
          ASSERT_EQ(Dequantized(options.tile, run.tiles().data(), TilePart::kKey, t, i), value);
        }
      }
    }
  }
}

TEST(EvictWindows, SumsAreThoseOfTheBytes) {
  CRUMB_NEEDS_DEVICE();
  for (const TileShape& shape : kShapes) {
    for (const Method method : {Method::kOscar, Method::kCrumb}) {
      EvictOptions options;
      options.tile = shape;
      options.method = method;
      options.windows = 5;
      EvictCase run(options);
      for (int round = 0; round < 2; ++round) {  // the second finds the workspace as the first did
        run.Run(options.windows + round);
        const std::vector<uint32_t> sums = run.sums();
        for (size_t i = 0; i < sums.size(); ++i) {
          ASSERT_EQ(sums[i],
                    Crc32cOracle(run.tiles().data() + i * shape.int2_bytes(), shape.int2_bytes()))
              << "d " << shape.head_dim << " G " << shape.group_size << " tile " << i;
        }
        for (const uint64_t word : run.workspace()) ASSERT_EQ(word, 0u);
      }
    }
  }
}

TEST(EvictWindows, SameBytesOnEveryRun) {
  CRUMB_NEEDS_DEVICE();
  for (const Method method : {Method::kOscar, Method::kCrumb}) {
    EvictOptions options;
    options.method = method;
    EvictCase run(options);
    run.Run(3);
    const std::vector<uint8_t> first = run.tiles();
    run.Run(20);  // another grid
    EXPECT_EQ(run.tiles(), first);
  }
}

TEST(EvictWindows, RefusesWhatItDoesNotServe) {
  EvictParams p;
  p.tile.tokens = 32;
  EXPECT_EQ(EvictWindows(p, nullptr), cudaErrorInvalidValue);
  p.tile.tokens = 64;
  uint32_t sums = 0;
  p.sums = &sums;
  EXPECT_EQ(EvictWindows(p, nullptr), cudaErrorInvalidValue);
}

}  // namespace
}  // namespace crumb::kernels::cuda
