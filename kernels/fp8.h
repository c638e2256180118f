// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

namespace crumb::kernels {

// FP8 E4M3, in which checkpoints store weights and engines keys and values: it has no infinities,
// and its largest value is 448.

inline constexpr float kFp8Max = 448.0f;

// Returns the exact value of `x`; 0x7f and 0xff are NaN.
inline float Fp8ToFloat(uint8_t x) {
  const int exponent = x >> 3 & 15, mantissa = x & 7;
  if (exponent == 15 && mantissa == 7) return NAN;
  const float magnitude = exponent == 0
                              ? std::ldexp(static_cast<float>(mantissa), -9)
                              : std::ldexp(static_cast<float>(8 + mantissa), exponent - 10);
  return x & 0x80 ? -magnitude : magnitude;
}

// Rounds to the nearest value, ties to even, limited to +-448; NaN stays NaN.
inline uint8_t Fp8FromFloat(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  const uint8_t sign = static_cast<uint8_t>(bits >> 24 & 0x80u);
  bits &= 0x7fffffffu;
  if (bits > 0x7f800000u) return sign | 0x7f;
  constexpr uint32_t kMaxBits = 0x43e00000u;     // 448
  constexpr uint32_t kNormalBits = 0x3c800000u;  // 2^-6, the least value with an exponent
  constexpr uint32_t kStepsBits = 0x46800000u;   // 2^14, whose neighbours are 2^-9 apart
  if (bits > kMaxBits) bits = kMaxBits;
  if (bits < kNormalBits) {
    float magnitude, steps;
    std::memcpy(&magnitude, &bits, sizeof(bits));
    std::memcpy(&steps, &kStepsBits, sizeof(steps));
    steps += magnitude;
    std::memcpy(&bits, &steps, sizeof(bits));
    return sign | static_cast<uint8_t>(bits - kStepsBits);
  }
  bits += 0x7ffffu + (bits >> 20 & 1u);
  // The exponent's bias is 7 in place of 127.
  return sign | static_cast<uint8_t>((bits >> 20) - (120u << 3));
}

}  // namespace crumb::kernels
