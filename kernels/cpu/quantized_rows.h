// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "kernels/fp16.h"
#include "kernels/quantize.h"

// The quantizers' output, which is then packed.
namespace crumb::kernels {

inline constexpr int kWindowTokens = 16;  // rows handled together: one token group of the layout
inline constexpr int kHeadDimMax = 256;
inline constexpr float kRangeMin = 1e-8f;  // least max - min of a group, which is three steps

// Codes and metadata of one 16-token group.
struct QuantizedRows {
  uint8_t codes[kWindowTokens][kHeadDimMax];
  // fp16 scale in the lower half, fp16 minimum in the upper one
  uint32_t meta[kWindowTokens][kHeadDimMax / 32];
};

// Returns the metadata word of one row and group.
inline uint32_t PackMeta(float scale, float minimum, uint32_t* status) {
  bool saturated = false;
  const uint32_t scale_bits = Fp16FromFloat(scale, &saturated);
  const uint32_t minimum_bits = Fp16FromFloat(minimum, &saturated);
  if (saturated) *status |= kStatusSaturated;
  return minimum_bits << 16 | scale_bits;
}

}  // namespace crumb::kernels
