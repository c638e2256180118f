// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <cstring>
#include <limits>

#include "kernels/bf16.h"
#include "kernels/cpu/rotate.h"
#include "kernels/fp16.h"
#include "kernels/quantize.h"

// Quantizes rows to codes, scales and minima and packs them. V is one of the Simd types; all of
// them give the same bytes: no fused operation, no sum whose order depends on the lanes.
namespace crumb::kernels {

inline constexpr int kWindowTokens = 16;  // rows handled together: one token group of the layout
inline constexpr int kHeadDimMax = 256;

// Codes and metadata of one 16-token group.
struct QuantizedRows {
  uint8_t codes[kWindowTokens][kHeadDimMax];
  uint32_t meta[kWindowTokens][kHeadDimMax / 32];  // fp16 scale, fp16 minimum above it
};

// y = x R - mean for `rows` rows.
template <typename V>
void TransformRows(const Bf16* x, int64_t stride, int rows, int dim, const RowTransform& transform,
                   float* y) {
  alignas(64) float plain[kWindowTokens * kHeadDimMax];
  float* loaded = transform.rotation == nullptr ? y : plain;
  for (int row = 0; row < rows; ++row) {
    for (int i = 0; i < dim; i += V::kLanes) {
      V::Store(loaded + row * dim + i, V::LoadBf16(x + row * stride + i));
    }
  }
  if (transform.rotation != nullptr) RotateRows<V>(plain, rows, dim, transform.rotation, y);
  if (transform.mean == nullptr) return;
  for (int row = 0; row < rows; ++row) {
    for (int i = 0; i < dim; i += V::kLanes) {
      float* at = y + row * dim + i;
      V::Store(at, V::Sub(V::Load(at), V::Load(transform.mean + i)));
    }
  }
}

template <typename V>
int CountAtLeast(const float* y, int dim, int32_t bound) {
  typename V::I counts = V::SetI(0);
  for (int i = 0; i < dim; i += V::kLanes) {
    counts = V::CountGreaterEqual(counts, V::AsInt(V::Abs(V::Load(y + i))), V::SetI(bound));
  }
  return V::ReduceAddI(counts);
}

// The `rank`-th largest |y|, exactly: order statistics of non-negative floats are those of their
// bits, found bit by bit from the top.
template <typename V>
float LargestMagnitude(const float* y, int dim, int rank) {
  int32_t bound = 0;
  for (int bit = 30; bit >= 0; --bit) {
    const int32_t higher = bound | (1 << bit);
    const int count = CountAtLeast<V>(y, dim, higher);
    if (count >= rank) bound = higher;
    if (count == rank) break;
  }
  typename V::I least = V::SetI(std::numeric_limits<int32_t>::max());
  for (int i = 0; i < dim; i += V::kLanes) {
    const typename V::I magnitude = V::AsInt(V::Abs(V::Load(y + i)));
    least = V::MinI(least, V::SelectGreaterEqual(magnitude, V::SetI(bound),
                                                 V::SetI(std::numeric_limits<int32_t>::max())));
  }
  const int32_t bits = V::ReduceMinI(least);
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

template <typename V>
bool AllFinite(const float* y, int dim) {
  typename V::I highest = V::SetI(0);
  for (int i = 0; i < dim; i += V::kLanes) {
    highest = V::MaxI(highest, V::AsInt(V::Abs(V::Load(y + i))));
  }
  return V::ReduceMaxI(highest) < 0x7f800000;
}

// The clip rule: the value at index min(floor(clip d), d - 1) of ascending |y|.
template <typename V>
float ClipThreshold(const float* y, int dim, float clip) {
  if (clip <= 0.0f) return std::numeric_limits<float>::max();
  const int wanted = static_cast<int>(clip * static_cast<float>(dim));
  const int index = wanted < dim - 1 ? wanted : dim - 1;
  return LargestMagnitude<V>(y, dim, dim - index);
}

// Codes of one group of a finite row: c = clamp(floor((x - lo) / s + 1/2), 0, 3) with x clamped to
// +-threshold. Returns the group's metadata word.
template <typename V>
uint32_t QuantizeGroup(const float* y, int size, float threshold, uint8_t* codes,
                       uint32_t* status) {
  const typename V::F upper = V::Set(threshold), lower = V::Set(-threshold);
  typename V::F most = lower, negated_least = lower;
  for (int i = 0; i < size; i += V::kLanes) {
    const typename V::F x = V::Max(V::Min(V::Load(y + i), upper), lower);
    most = V::Max(most, x);
    negated_least = V::Max(negated_least, V::Sub(V::Set(0.0f), x));
  }
  const float hi = V::ReduceMax(most), lo = -V::ReduceMax(negated_least);
  float range = hi - lo;
  if (!(range > 1e-8f)) range = 1e-8f;
  if (range > std::numeric_limits<float>::max()) range = std::numeric_limits<float>::max();
  const float scale = range / 3.0f;
  for (int i = 0; i < size; i += V::kLanes) {
    const typename V::F x = V::Max(V::Min(V::Load(y + i), upper), lower);
    const typename V::F steps = V::Add(V::Div(V::Sub(x, V::Set(lo)), V::Set(scale)), V::Set(0.5f));
    int32_t code[V::kLanes];
    V::StoreI(code, V::Truncate(V::Max(V::Min(steps, V::Set(3.0f)), V::Set(0.0f))));
    for (int lane = 0; lane < V::kLanes; ++lane) codes[i + lane] = static_cast<uint8_t>(code[lane]);
  }
  bool saturated = false;
  const uint32_t scale_bits = Fp16FromFloat(scale, &saturated);
  const uint32_t minimum_bits = Fp16FromFloat(lo, &saturated);
  if (saturated) *status |= kStatusSaturated;
  return minimum_bits << 16 | scale_bits;
}

template <typename V>
uint32_t QuantizeRow(const float* y, const TileShape& shape, float clip, uint8_t* codes,
                     uint32_t* meta) {
  if (!AllFinite<V>(y, shape.head_dim)) {
    std::memset(codes, 0, shape.head_dim);
    for (int group = 0; group < shape.groups(); ++group) meta[group] = 0;
    return kStatusNonFinite;
  }
  uint32_t status = 0;
  const float threshold = ClipThreshold<V>(y, shape.head_dim, clip);
  for (int group = 0; group < shape.groups(); ++group) {
    const int first = group * shape.group_size;
    meta[group] = QuantizeGroup<V>(y + first, shape.group_size, threshold, codes + first, &status);
  }
  return status;
}

inline constexpr int kWordsPerStep = 4;  // words of one lane group: docs/formats/page-tile.md

// Bytes from a token group's begin to word `word` of lane `lane`.
template <typename V>
int WordOffset(int dim, int lane, int word) {
  const int width = dim == 64 ? 2 : 4;
  return 128 * width * (word / width) + 4 * width * lane + 4 * (word % width);
}

// Packs the K codes of one token group: a word holds channels of one token.
template <typename V>
void PackKeys(const QuantizedRows& rows, int dim, uint8_t* out) {
  for (int token = 0; token < kWindowTokens; ++token) {
    uint32_t pairs[kHeadDimMax / 2];
    for (int i = 0; i < dim / 2; ++i) {
      pairs[i] = rows.codes[token][2 * i] | static_cast<uint32_t>(rows.codes[token][2 * i + 1])
                                                << 16;
    }
    for (int step = 0; step < dim / 64; ++step) {
      uint32_t words[kWordsPerStep] = {};
      for (int j = 0; j < 8; ++j) {
        for (int c = 0; c < 4; ++c) words[c] |= pairs[32 * step + 4 * j + c] << (2 * j);
      }
      for (int c = 0; c < 4; ++c) {
        const int lane = 4 * (token % 8) + c;
        std::memcpy(out + WordOffset<V>(dim, lane, 2 * step + token / 8), &words[c], 4);
      }
    }
  }
}

// Packs the V codes of one token group: a word holds two tokens of eight channels.
template <typename V>
void PackValues(const QuantizedRows& rows, int dim, uint8_t* out) {
  for (int pair = 0; pair < kWindowTokens / 2; ++pair) {
    const int c = pair % 4, b = pair / 4;
    for (int step = 0; step < dim / 64; ++step) {
      const uint8_t* even = rows.codes[2 * pair] + 64 * step;
      const uint8_t* odd = rows.codes[2 * pair + 1] + 64 * step;
      uint32_t words[8] = {};
      for (int j = 0; j < 8; ++j) {
        for (int r = 0; r < 8; ++r) {
          words[r] |= (even[8 * j + r] | static_cast<uint32_t>(odd[8 * j + r]) << 16) << (2 * j);
        }
      }
      for (int r = 0; r < 8; ++r) {
        std::memcpy(out + WordOffset<V>(dim, 4 * r + c, 2 * step + b), &words[r], 4);
      }
    }
  }
}

// One half of a tile: `codes` and `meta` are its areas.
template <typename V>
uint32_t QuantizeHalf(const TileShape& shape, const Bf16* x, int64_t stride,
                      const RowTransform& transform, bool values, uint8_t* codes, uint8_t* meta) {
  uint32_t status = 0;
  alignas(64) float y[kWindowTokens * kHeadDimMax];
  QuantizedRows rows;
  for (int u = 0; u < shape.tokens / kWindowTokens; ++u) {
    TransformRows<V>(x + u * kWindowTokens * stride, stride, kWindowTokens, shape.head_dim,
                     transform, y);
    for (int t = 0; t < kWindowTokens; ++t) {
      status |= QuantizeRow<V>(y + t * shape.head_dim, shape, transform.clip, rows.codes[t],
                               rows.meta[t]);
      for (int group = 0; group < shape.groups(); ++group) {
        const int r = t % 8, a = t / 8;
        std::memcpy(meta + 4 * shape.tokens * group + shape.tokens / 2 * r + 4 * (2 * u + a),
                    &rows.meta[t][group], 4);
      }
    }
    uint8_t* out = codes + 4 * shape.head_dim * u;
    if (values) {
      PackValues<V>(rows, shape.head_dim, out);
    } else {
      PackKeys<V>(rows, shape.head_dim, out);
    }
  }
  return status;
}

template <typename V>
uint32_t QuantizeWholeTile(const QuantizeParams& params) {
  const TileShape& shape = params.shape;
  uint8_t* meta = params.tile + 2 * shape.code_bytes();
  return QuantizeHalf<V>(shape, params.k, params.k_stride, params.k_transform, false, params.tile,
                         meta) |
         QuantizeHalf<V>(shape, params.v, params.v_stride, params.v_transform, true,
                         params.tile + shape.code_bytes(), meta + shape.meta_bytes());
}

}  // namespace crumb::kernels
