// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

// FP8 E4M3 as checkpoints store weights: no infinities, 448 is the largest value.
namespace crumb::calibration {

inline constexpr float kFp8Max = 448.0f;

// The value of `x`, exactly; 0x7f and 0xff are NaN.
inline float Fp8ToFloat(uint8_t x) {
  const int exponent = x >> 3 & 15, mantissa = x & 7;
  if (exponent == 15 && mantissa == 7) return NAN;
  const float magnitude = exponent == 0
                              ? std::ldexp(static_cast<float>(mantissa), -9)
                              : std::ldexp(static_cast<float>(8 + mantissa), exponent - 10);
  return x & 0x80 ? -magnitude : magnitude;
}

// Nearest even, limited to +-448. `x` must not be NaN.
inline uint8_t Fp8FromFloat(float x) {
  const uint8_t sign = std::signbit(x) ? 0x80 : 0;
  const float magnitude = std::min(std::abs(x), kFp8Max);
  // The step between values is 2^-9 below 2^-6, and an eighth of the power of two above.
  const int exponent = std::max(std::ilogb(std::max(magnitude, 0x1p-20f)), -6);
  const int steps = static_cast<int>(std::nearbyint(std::ldexp(magnitude, 3 - exponent)));
  // `steps` counts from 0; 16 is the next power of two, which the addition carries into.
  return static_cast<uint8_t>(sign | ((exponent + 6) * 8 + steps));
}

}  // namespace crumb::calibration
