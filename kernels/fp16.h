// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <cstring>

// IEEE half precision, in which page tiles store scales and minima.
namespace crumb::kernels {

// Returns the value of the half with these bits, exactly.
[[gnu::always_inline]] inline float Fp16ToFloat(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16;
  const uint32_t magnitude = half & 0x7fffu;
  // In a float's exponent field the exponent of a half is too small by 112. A multiplication by
  // 2^112 corrects it and normalises subnormals; infinities and NaNs need the exponent filled.
  uint32_t bits = magnitude << 13;
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  value *= 0x1p112f;
  std::memcpy(&bits, &value, sizeof(bits));
  if (magnitude >= 0x7c00u) bits |= 0x7f800000u;
  bits |= sign;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

// Rounds to nearest even and clamps to +-65504; sets *saturated if the clamp changed the value.
// REQUIRES: `x` is not NaN.
[[gnu::always_inline]] inline uint16_t Fp16FromFloat(float x, bool* saturated) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  const uint32_t sign = (bits >> 16) & 0x8000u;
  bits &= 0x7fffffffu;
  if (bits >= 0x477ff000u) {  // 65520 and above would round to infinity
    *saturated = true;
    return static_cast<uint16_t>(sign | 0x7bffu);
  }
  if (bits < 0x38800000u) {  // below 2^-14: the half is subnormal, in steps of 2^-24
    // Adding 0.5 leaves the multiples of 2^-24 in a float's mantissa, exactly rounded.
    float value;
    std::memcpy(&value, &bits, sizeof(value));
    value += 0.5f;
    std::memcpy(&bits, &value, sizeof(bits));
    return static_cast<uint16_t>(sign | (bits - 0x3f000000u));
  }
  bits += 0xfffu + ((bits >> 13) & 1u);
  return static_cast<uint16_t>(sign | ((bits - 0x38000000u) >> 13));
}

}  // namespace crumb::kernels
