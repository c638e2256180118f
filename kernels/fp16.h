// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <cstring>

// IEEE half precision as the page tile stores scales and minima.
namespace crumb::kernels {

inline constexpr float kFp16Max = 65504.0f;

// The value of the half with these bits, exactly.
[[gnu::always_inline]] inline float Fp16ToFloat(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16;
  const uint32_t magnitude = half & 0x7fffu;
  // Moved into a float's exponent field a half is short of 2^112; subnormals become normal by the
  // same multiplication, infinities and NaNs need the exponent filled.
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

// Nearest even, limited to +-65504; `*saturated` becomes true when the limit changed the value.
// `x` must not be NaN.
[[gnu::always_inline]] inline uint16_t Fp16FromFloat(float x, bool* saturated) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  const uint32_t sign = (bits >> 16) & 0x8000u;
  bits &= 0x7fffffffu;
  if (bits >= 0x477ff000u) {  // 65520 and more would round to infinity
    *saturated = true;
    return static_cast<uint16_t>(sign | 0x7bffu);
  }
  if (bits < 0x38800000u) {  // below 2^-14: the half is subnormal, in steps of 2^-24
    // Adding 0.5 leaves exactly the multiples of 2^-24 in a float's mantissa.
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
