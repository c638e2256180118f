// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "tests/kernels/cuda/evict_inputs.h"

#include <algorithm>
#include <utility>

#include "kernels/bf16.h"
#include "kernels/tile_codec.h"
#include "tests/kernels/cuda/random_inputs.h"

namespace crumb::kernels::cuda {

std::vector<float> RandomFeedback(int dim, std::mt19937& random) {
  std::vector<float> feedback(static_cast<size_t>(dim) * dim, 0.0f);
  std::normal_distribution<float> normal;
  for (int i = 0; i < dim; ++i) {
    for (int j = i + 1; j < dim; ++j) feedback[i * dim + j] = 0.3f / (1 + j - i) * normal(random);
  }
  return feedback;
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

}  // namespace crumb::kernels::cuda
