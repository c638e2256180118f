// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <cstring>
#include <limits>

#include "kernels/bf16.h"
#include "kernels/cpu/feedback_rows.h"
#include "kernels/cpu/rotate.h"
#include "kernels/cpu/row_range.h"
#include "kernels/quantize.h"
#include "kernels/tile_codec.h"

// Quantizes rows to codes, scales and minima and packs them. V is one of the Simd types. All of
// them produce the same bytes: there is no fused operation and no sum whose order depends on the
// lanes.
namespace crumb::kernels {

// Computes y = x R - mean for `rows` rows.
template <typename V>
void TransformRows(const Bf16* x, int64_t stride, int rows, int dim, const RowTransform& transform,
                   float* y) {
  alignas(64) float plain[kGroupTokens * kHeadDimMax];
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

// Rounds one group of a finite row: c = clamp(floor((x - lo) / s + 1/2), 0, 3) with x clamped to
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
  if (!(range > kRangeMin)) range = kRangeMin;
  if (range > std::numeric_limits<float>::max()) range = std::numeric_limits<float>::max();
  const float scale = range / 3.0f;
  for (int i = 0; i < size; i += V::kLanes) {
    const typename V::F x = V::Max(V::Min(V::Load(y + i), upper), lower);
    const typename V::F steps = V::Add(V::Div(V::Sub(x, V::Set(lo)), V::Set(scale)), V::Set(0.5f));
    int32_t code[V::kLanes];
    V::StoreI(code, V::Truncate(V::Max(V::Min(steps, V::Set(3.0f)), V::Set(0.0f))));
    for (int lane = 0; lane < V::kLanes; ++lane) codes[i + lane] = static_cast<uint8_t>(code[lane]);
  }
  return PackMeta(scale, lo, status);
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

// Returns the bytes from a token group's begin to word `word` of lane `lane`.
template <typename V>
int WordOffset(int dim, int lane, int word) {
  const int width = dim == 64 ? 2 : 4;
  return 128 * width * (word / width) + 4 * width * lane + 4 * (word % width);
}

// Packs the K codes of one token group. A word holds channels of one token.
template <typename V>
void PackKeys(const QuantizedRows& rows, int dim, uint8_t* out) {
  for (int token = 0; token < kGroupTokens; ++token) {
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

// Packs the V codes of one token group. A word holds two tokens of eight channels.
template <typename V>
void PackValues(const QuantizedRows& rows, int dim, uint8_t* out) {
  for (int pair = 0; pair < kGroupTokens / 2; ++pair) {
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

// Quantizes one token group of rotated, centred rows y [16, head_dim] by `method`. Returns status
// bits.
template <typename V>
uint32_t QuantizeRows(const TileShape& shape, Method method, const RowTransform& transform,
                      const float* y, QuantizedRows& rows) {
  if (method == Method::kCrumb) return QuantizeWithFeedback<V>(shape, transform, y, rows);
  uint32_t status = 0;
  for (int t = 0; t < kGroupTokens; ++t) {
    status |=
        QuantizeRow<V>(y + t * shape.head_dim, shape, transform.clip, rows.codes[t], rows.meta[t]);
  }
  return status;
}

// Stores the metadata of token group `u` (docs/formats/page-tile.md).
inline void StoreMeta(const TileShape& shape, const QuantizedRows& rows, int u, uint8_t* meta) {
  for (int t = 0; t < kGroupTokens; ++t) {
    const int r = t % 8, a = t / 8;
    for (int group = 0; group < shape.groups(); ++group) {
      std::memcpy(meta + 4 * shape.tokens * group + shape.tokens / 2 * r + 4 * (2 * u + a),
                  &rows.meta[t][group], 4);
    }
  }
}

// Quantizes one half of a tile. `codes` and `meta` are its areas.
template <typename V>
uint32_t QuantizeHalf(const TileShape& shape, Method method, const Bf16* x, int64_t stride,
                      const RowTransform& transform, TilePart part, uint8_t* codes, uint8_t* meta) {
  uint32_t status = 0;
  alignas(64) float y[kGroupTokens * kHeadDimMax];
  QuantizedRows rows;
  for (int u = 0; u < shape.tokens / kGroupTokens; ++u) {
    TransformRows<V>(x + u * kGroupTokens * stride, stride, kGroupTokens, shape.head_dim, transform,
                     y);
    status |= QuantizeRows<V>(shape, method, transform, y, rows);
    StoreMeta(shape, rows, u, meta);
    uint8_t* out = codes + 4 * shape.head_dim * u;
    if (part == TilePart::kValue) {
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
  return QuantizeHalf<V>(shape, params.method, params.k, params.k_stride, params.k_transform,
                         TilePart::kKey, params.tile, meta) |
         QuantizeHalf<V>(shape, params.method, params.v, params.v_stride, params.v_transform,
                         TilePart::kValue, params.tile + shape.code_bytes(),
                         meta + shape.meta_bytes());
}

}  // namespace crumb::kernels
