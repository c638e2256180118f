// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "tests/kernels/cuda/evict/evict_inputs.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "kernels/bf16.h"
#include "kernels/fp16.h"
#include "kernels/tile_codec.h"
#include "tests/kernels/cuda/random_inputs.h"

namespace crumb::kernels::cuda {

double Dequantized(const TileShape& shape, const uint8_t* tile, TilePart part, int t, int channel) {
  const RowMeta meta = ReadMeta(shape, tile, part, t, channel / shape.group_size);
  return Fp16ToFloat(meta.minimum) +
         Fp16ToFloat(meta.scale) * ReadCode(shape, tile, part, t, channel);
}

std::vector<float> RandomFeedback(int dim, std::mt19937& random) {
  std::vector<float> feedback(static_cast<size_t>(dim) * dim, 0.0f);
  std::normal_distribution<float> normal;
  for (int i = 0; i < dim; ++i) {
    for (int j = i + 1; j < dim; ++j) feedback[i * dim + j] = 0.3f / (1 + j - i) * normal(random);
  }
  return feedback;
}

void AddWeights(int dim, std::mt19937& random, std::vector<float>& feedback) {
  std::normal_distribution<float> normal;
  for (int i = 0; i < dim; ++i) feedback[i * dim + i] = std::exp(normal(random));
}

void SetStrides(EvictParams* params) {
  EvictParams& p = *params;
  const int dim = p.tile.head_dim;
  p.ring_capacity = kEvictRing;
  p.ring_head_stride = 4 * kEvictRing * dim;
  p.ring_layer_stride = p.ring_head_stride * p.kv_heads;
  p.ring_token_stride = 2 * dim;
  p.ring_v_offset = 2 * kEvictRing * dim;
  p.tile_head_stride = static_cast<int64_t>(p.tile.int2_bytes());
  p.tile_layer_stride = p.tile_head_stride * p.kv_heads;
}

std::vector<Bf16> WindowOfRing(const Bf16* ring, int begin, int dim) {
  std::vector<Bf16> window(size_t{2} * 64 * dim);
  for (int t = 0; t < 64; ++t) {
    const int slot = (begin + t) % kEvictRing;
    std::copy_n(ring + slot * dim, dim, window.begin() + t * dim);
    std::copy_n(ring + (kEvictRing + slot) * dim, dim, window.begin() + (64 + t) * dim);
  }
  return window;
}

void EvictConstants::Upload(const std::vector<float>& rotation, const std::vector<float>& feedback,
                            const std::vector<float>& mean, int dim) {
  dim_ = dim;
  matrices_ = rotation.size() / dim / dim / 2;
  const int count = static_cast<int>(2 * matrices_);
  const DeviceBuffer plain(rotation), upper(feedback);
  rotation_.Allocate(count * EvictRotationBytes(dim));
  EXPECT_EQ(
      PrepareEvictRotation(plain.as<float>(), dim, count, rotation_.as<EvictRotation>(), nullptr),
      cudaSuccess);
  feedback_.Allocate(count * EvictFeedbackBytes(dim));
  EXPECT_EQ(
      PrepareEvictFeedback(upper.as<float>(), dim, count, feedback_.as<EvictFeedback>(), nullptr),
      cudaSuccess);
  mean_.Upload(mean);
  EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
}

EvictTransform EvictConstants::Of(int value) const {
  EvictTransform t;
  const size_t matrix = value * matrices_;
  t.rotation = reinterpret_cast<const EvictRotation*>(rotation_.as<char>() +
                                                      matrix * EvictRotationBytes(dim_));
  t.feedback = reinterpret_cast<const EvictFeedback*>(feedback_.as<char>() +
                                                      matrix * EvictFeedbackBytes(dim_));
  t.mean = mean_.as<float>() + value * (mean_.bytes() / sizeof(float) / 2);
  return t;
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

}  // namespace crumb::kernels::cuda
