// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <cstring>
#include <limits>

#include "kernels/fp16.h"
#include "kernels/quantize.h"

// Rows of the quantizers: their output, which is then packed, and order statistics of a whole row
// y [dim]. V is one of the Simd types; all of them return the same values.
namespace crumb::kernels {

inline constexpr int kGroupTokens = 16;  // rows handled together: one token group of the layout
inline constexpr int kHeadDimMax = 256;
inline constexpr float kRangeMin = 1e-8f;  // least max - min of a group, which is three steps

// Codes and metadata of one 16-token group.
struct QuantizedRows {
  uint8_t codes[kGroupTokens][kHeadDimMax];
  // fp16 scale in the lower half, fp16 minimum in the upper one
  uint32_t meta[kGroupTokens][kHeadDimMax / 32];
};

// Returns the metadata word of one row and group.
inline uint32_t PackMeta(float scale, float minimum, uint32_t* status) {
  bool saturated = false;
  const uint32_t scale_bits = Fp16FromFloat(scale, &saturated);
  const uint32_t minimum_bits = Fp16FromFloat(minimum, &saturated);
  if (saturated) *status |= kStatusSaturated;
  return minimum_bits << 16 | scale_bits;
}

template <typename V>
int CountAtLeast(const float* y, int dim, int32_t bound) {
  typename V::I counts = V::SetI(0);
  for (int i = 0; i < dim; i += V::kLanes) {
    counts = V::CountGreaterEqual(counts, V::AsInt(V::Abs(V::Load(y + i))), V::SetI(bound));
  }
  return V::ReduceAddI(counts);
}

// Returns the `rank`-th largest |y| exactly. The order of non-negative floats is that of their
// bits, so the value is found bit by bit from the top.
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

// Returns the clip threshold: the value at index min(floor(clip d), d - 1) of ascending |y|.
template <typename V>
float ClipThreshold(const float* y, int dim, float clip) {
  if (clip <= 0.0f) return std::numeric_limits<float>::max();
  const int wanted = static_cast<int>(clip * static_cast<float>(dim));
  const int index = wanted < dim - 1 ? wanted : dim - 1;
  return LargestMagnitude<V>(y, dim, dim - index);
}

}  // namespace crumb::kernels
