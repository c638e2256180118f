// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

#include "kernels/cpu/row_range.h"
#include "kernels/fp16.h"
#include "kernels/quantize.h"

// Rounding of the method `crumb`: each channel's error propagates to later channels, and a scale
// keeps a row's inner product with itself (docs/kernels/cpu.md, "Feedback"). Channels depend on
// each other, so the lanes of a vector are rows. Every element's sum runs in ascending order of the
// channel with separate multiplication and addition, so every instruction set produces the same
// bits.
namespace crumb::kernels {

// Bound on magnitudes. A row with larger ones saturates its scale or minimum anyway; up to it no
// multiplication overflows.
inline constexpr float kFeedbackMagnitudeMax = 0x1p56f;
inline constexpr float kInnerProductRatioMax = 2.0f;
inline constexpr int kFeedbackBlock = 8;  // channels whose sums stay in registers

// One token group, transposed: channels are the outer index, rows the inner one.
struct FeedbackRows {
  alignas(64) float y[kHeadDimMax][kGroupTokens];      // rotated and centred, never clipped
  alignas(64) float error[kHeadDimMax][kGroupTokens];  // y - z
  // y - z plus the earlier channels' contributions: (y - z) (I + U)
  alignas(64) float rest[kHeadDimMax][kGroupTokens];
  alignas(64) float code[kHeadDimMax][kGroupTokens];
  alignas(64) float threshold[kGroupTokens];  // clip threshold of the row
  alignas(64) float low[kHeadDimMax / 32][kGroupTokens];
  alignas(64) float scale[kHeadDimMax / 32][kGroupTokens];
  alignas(64) float ratio[kGroupTokens];  // <y, y> / <y, z> in the transform's metric, clamped
  bool finite[kGroupTokens];
};

// Finds the ranges of all groups and rows under their thresholds.
template <typename V>
void FindRanges(const TileShape& shape, FeedbackRows& rows) {
  const typename V::F float_max = V::Set(std::numeric_limits<float>::max());
  for (int lane = 0; lane < kGroupTokens; lane += V::kLanes) {
    const typename V::F upper = V::Load(rows.threshold + lane);
    const typename V::F lower = V::Sub(V::Set(0.0f), upper);
    for (int group = 0; group < shape.groups(); ++group) {
      typename V::F least = float_max, most = V::Sub(V::Set(0.0f), float_max);
      for (int j = group * shape.group_size; j < (group + 1) * shape.group_size; ++j) {
        const typename V::F x = V::Max(V::Min(V::Load(rows.y[j] + lane), upper), lower);
        least = V::Min(least, x);
        most = V::Max(most, x);
      }
      const typename V::F range = V::Max(V::Sub(most, least), V::Set(kRangeMin));
      V::Store(rows.low[group] + lane, least);
      V::Store(rows.scale[group] + lane, V::Div(range, V::Set(3.0f)));
    }
  }
}

// Adds the contributions of channels [0, first) of `from` to channels [first, first +
// kFeedbackBlock) of V::kLanes rows. Row i of `feedback` [dim, dim] holds U's factors of channel i.
template <typename V>
void AddEarlierChannels(const float (&from)[kHeadDimMax][kGroupTokens], const float* feedback,
                        int dim, int first, int lane, typename V::F (&sums)[kFeedbackBlock]) {
  for (int i = 0; i < first; ++i) {
    const typename V::F value = V::Load(from[i] + lane);
    const float* weights = feedback + i * dim + first;
    for (int c = 0; c < kFeedbackBlock; ++c) {
      sums[c] = V::Add(sums[c], V::Mul(value, V::Set(weights[c])));
    }
  }
}

// Rounds channels [first, first + kFeedbackBlock) of V::kLanes rows. `feedback` may be null.
template <typename V>
void RoundBlock(const TileShape& shape, const float* feedback, int first, int lane,
                FeedbackRows& rows) {
  const int dim = shape.head_dim, group = first / shape.group_size;
  typename V::F target[kFeedbackBlock];
  for (int c = 0; c < kFeedbackBlock; ++c) target[c] = V::Load(rows.y[first + c] + lane);
  if (feedback != nullptr) {
    AddEarlierChannels<V>(rows.error, feedback, dim, first, lane, target);
  }
  const typename V::F low = V::Load(rows.low[group] + lane);
  const typename V::F scale = V::Load(rows.scale[group] + lane);
  for (int c = 0; c < kFeedbackBlock; ++c) {
    const int j = first + c;
    const typename V::F steps = V::Add(V::Div(V::Sub(target[c], low), scale), V::Set(0.5f));
    const typename V::F code =
        V::ToFloat(V::Truncate(V::Max(V::Min(steps, V::Set(3.0f)), V::Set(0.0f))));
    const typename V::F z = V::Add(low, V::Mul(scale, code));
    const typename V::F error = V::Sub(V::Load(rows.y[j] + lane), z);
    V::Store(rows.code[j] + lane, code);
    V::Store(rows.error[j] + lane, error);
    V::Store(rows.rest[j] + lane, V::Sub(target[c], z));
    if (feedback == nullptr) continue;
    for (int later = c + 1; later < kFeedbackBlock; ++later) {
      const typename V::F weight = V::Set(feedback[j * dim + first + later]);
      target[later] = V::Add(target[later], V::Mul(error, weight));
    }
  }
}

// Sets the ratios own / product, clamped to [1/2, 2]. A ratio is 1 if <y, z> is not positive, or if
// a sum is not finite.
inline void SetRatios(const float (&own)[kGroupTokens], const float (&product)[kGroupTokens],
                      FeedbackRows& rows) {
  constexpr float kMost = std::numeric_limits<float>::max();
  for (int t = 0; t < kGroupTokens; ++t) {
    const bool usable = product[t] > 0.0f && product[t] <= kMost && own[t] <= kMost;
    rows.ratio[t] = usable ? std::clamp(own[t] / product[t], 1.0f / kInnerProductRatioMax,
                                        kInnerProductRatioMax)
                           : 1.0f;
  }
}

// Finds the ratios <y, y> / <y, z>.
template <typename V>
void FindRatios(const TileShape& shape, FeedbackRows& rows) {
  alignas(64) float yy[kGroupTokens], yz[kGroupTokens];
  for (int lane = 0; lane < kGroupTokens; lane += V::kLanes) {
    typename V::F own = V::Set(0.0f), product = V::Set(0.0f);
    for (int j = 0; j < shape.head_dim; ++j) {
      const int group = j / shape.group_size;
      const typename V::F y = V::Load(rows.y[j] + lane);
      const typename V::F z =
          V::Add(V::Load(rows.low[group] + lane),
                 V::Mul(V::Load(rows.scale[group] + lane), V::Load(rows.code[j] + lane)));
      own = V::Add(own, V::Mul(y, y));
      product = V::Add(product, V::Mul(y, z));
    }
    V::Store(yy + lane, own);
    V::Store(yz + lane, product);
  }
  SetRatios(yy, yz, rows);
}

// Finds the ratios y H y' / y H z' with the metric H = (I + U) D (I + U)' of `feedback`. With g = y
// (I + U) and `rest` = (y - z) (I + U), the two are the sums of D g^2 and of D g (g - rest).
template <typename V>
void FindMetricRatios(const TileShape& shape, const float* feedback, FeedbackRows& rows) {
  const int dim = shape.head_dim;
  alignas(64) float yy[kGroupTokens], yz[kGroupTokens];
  for (int lane = 0; lane < kGroupTokens; lane += V::kLanes) {
    typename V::F own = V::Set(0.0f), product = V::Set(0.0f);
    for (int first = 0; first < dim; first += kFeedbackBlock) {
      typename V::F g[kFeedbackBlock];
      for (int c = 0; c < kFeedbackBlock; ++c) g[c] = V::Load(rows.y[first + c] + lane);
      AddEarlierChannels<V>(rows.y, feedback, dim, first, lane, g);
      for (int c = 0; c < kFeedbackBlock; ++c) {
        const int j = first + c;
        for (int i = first; i < j; ++i) {
          g[c] = V::Add(g[c], V::Mul(V::Load(rows.y[i] + lane), V::Set(feedback[i * dim + j])));
        }
        const typename V::F weighted = V::Mul(g[c], V::Set(feedback[j * dim + j]));
        const typename V::F h = V::Sub(g[c], V::Load(rows.rest[j] + lane));
        own = V::Add(own, V::Mul(weighted, g[c]));
        product = V::Add(product, V::Mul(weighted, h));
      }
    }
    V::Store(yy + lane, own);
    V::Store(yz + lane, product);
  }
  SetRatios(yy, yz, rows);
}

template <typename V>
void RoundRows(const TileShape& shape, const RowTransform& transform, FeedbackRows& rows) {
  FindRanges<V>(shape, rows);
  for (int lane = 0; lane < kGroupTokens; lane += V::kLanes) {
    for (int first = 0; first < shape.head_dim; first += kFeedbackBlock) {
      RoundBlock<V>(shape, transform.feedback, first, lane, rows);
    }
  }
  if (transform.has_metric()) {
    FindMetricRatios<V>(shape, transform.feedback, rows);
  } else {
    FindRatios<V>(shape, rows);
  }
}

// Transposes rows of `y` [16, head_dim]. Rows that are not finite become 0.
template <typename V>
void TakeRows(const TileShape& shape, float clip, const float* y, FeedbackRows& rows) {
  const int dim = shape.head_dim;
  for (int t = 0; t < kGroupTokens; ++t) {
    const float* row = y + t * dim;
    rows.finite[t] = AllFinite<V>(row, dim);
    rows.threshold[t] =
        rows.finite[t] ? std::min(ClipThreshold<V>(row, dim, clip), kFeedbackMagnitudeMax) : 0.0f;
    for (int j = 0; j < dim; ++j) {
      rows.y[j][t] =
          rows.finite[t] ? std::clamp(row[j], -kFeedbackMagnitudeMax, kFeedbackMagnitudeMax) : 0.0f;
    }
  }
}

// Quantizes one token group of rotated, centred rows y [16, head_dim]. Returns status bits.
template <typename V>
uint32_t QuantizeWithFeedback(const TileShape& shape, const RowTransform& transform, const float* y,
                              QuantizedRows& out) {
  FeedbackRows rows;
  TakeRows<V>(shape, transform.clip, y, rows);
  RoundRows<V>(shape, transform, rows);
  // A ratio at its limit shows that the clip has cut off most of the row.
  bool again = false;
  for (int t = 0; t < kGroupTokens; ++t) {
    if (rows.ratio[t] < kInnerProductRatioMax) continue;
    rows.threshold[t] = kFeedbackMagnitudeMax;
    again = true;
  }
  if (again && transform.clip > 0.0f) RoundRows<V>(shape, transform, rows);

  uint32_t status = 0;
  for (int t = 0; t < kGroupTokens; ++t) {
    for (int j = 0; j < shape.head_dim; ++j) {
      out.codes[t][j] = static_cast<uint8_t>(rows.code[j][t]);
    }
    for (int group = 0; group < shape.groups(); ++group) {
      out.meta[t][group] = rows.finite[t] ? PackMeta(rows.ratio[t] * rows.scale[group][t],
                                                     rows.ratio[t] * rows.low[group][t], &status)
                                          : 0;
    }
    if (!rows.finite[t]) status |= kStatusNonFinite;
  }
  return status;
}

}  // namespace crumb::kernels
