// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include <cmath>
#include <cstring>
#include <limits>

#include "gtest/gtest.h"
#include "kernels/bf16.h"
#include "kernels/fp16.h"

namespace crumb::kernels {
namespace {

// Returns the value of a finite half by its definition.
double HalfValue(int bits) {
  const int exponent = bits >> 10 & 31, mantissa = bits & 1023;
  const double magnitude =
      exponent == 0 ? std::ldexp(mantissa, -24) : std::ldexp(1024 + mantissa, exponent - 25);
  return bits & 0x8000 ? -magnitude : magnitude;
}

TEST(Fp16, ToFloatIsExactForEveryFiniteHalf) {
  for (int bits = 0; bits < 0x10000; ++bits) {
    if ((bits & 0x7c00) == 0x7c00) continue;
    const float value = Fp16ToFloat(static_cast<uint16_t>(bits));
    ASSERT_EQ(value, HalfValue(bits)) << bits;
    ASSERT_EQ(std::signbit(value), bits >= 0x8000) << bits;
  }
}

TEST(Fp16, ToFloatKeepsInfinityAndNan) {
  EXPECT_EQ(Fp16ToFloat(0x7c00), std::numeric_limits<float>::infinity());
  EXPECT_EQ(Fp16ToFloat(0xfc00), -std::numeric_limits<float>::infinity());
  EXPECT_TRUE(std::isnan(Fp16ToFloat(0x7c01)));
  EXPECT_TRUE(std::isnan(Fp16ToFloat(0xffff)));
}

TEST(Fp16, FromFloatInvertsEveryFiniteHalf) {
  for (int bits = 0; bits < 0x10000; ++bits) {
    if ((bits & 0x7c00) == 0x7c00) continue;
    bool saturated = false;
    ASSERT_EQ(Fp16FromFloat(static_cast<float>(HalfValue(bits)), &saturated), bits);
    ASSERT_FALSE(saturated);
  }
}

// Between two neighbours the midpoint rounds to the even one, and any other value to the nearer
// one.
TEST(Fp16, FromFloatRoundsToNearestEven) {
  for (int bits = 0; bits < 0x7bff; ++bits) {
    const float middle = static_cast<float>((HalfValue(bits) + HalfValue(bits + 1)) / 2);
    bool saturated = false;
    ASSERT_EQ(Fp16FromFloat(middle, &saturated), bits + bits % 2) << bits;
    ASSERT_EQ(Fp16FromFloat(-middle, &saturated), 0x8000 + bits + bits % 2) << bits;
    ASSERT_EQ(Fp16FromFloat(std::nextafter(middle, 0.0f), &saturated), bits) << bits;
    ASSERT_EQ(Fp16FromFloat(std::nextafter(middle, 1e9f), &saturated), bits + 1) << bits;
    ASSERT_FALSE(saturated);
  }
}

TEST(Fp16, FromFloatSaturates) {
  for (const float x : {65520.0f, 1e5f, 3e38f, std::numeric_limits<float>::infinity()}) {
    bool saturated = false;
    EXPECT_EQ(Fp16FromFloat(x, &saturated), 0x7bff);
    EXPECT_TRUE(saturated) << x;
    saturated = false;
    EXPECT_EQ(Fp16FromFloat(-x, &saturated), 0xfbff);
    EXPECT_TRUE(saturated) << -x;
  }
  bool saturated = false;
  EXPECT_EQ(Fp16FromFloat(65519.0f, &saturated), 0x7bff);
  EXPECT_FALSE(saturated);
}

TEST(Bf16, RoundTripsEveryFiniteValue) {
  for (int bits = 0; bits < 0x10000; ++bits) {
    if ((bits & 0x7f80) == 0x7f80 && (bits & 0x7f) != 0) continue;
    const Bf16 x{static_cast<uint16_t>(bits)};
    ASSERT_EQ(Bf16FromFloat(Bf16ToFloat(x)).bits, bits);
  }
}

TEST(Bf16, RoundsToNearestEven) {
  for (int bits = 0; bits < 0x7f7f; ++bits) {
    constexpr float kInfinity = std::numeric_limits<float>::infinity();
    const float low = Bf16ToFloat({static_cast<uint16_t>(bits)});
    const float high = Bf16ToFloat({static_cast<uint16_t>(bits + 1)});
    const float middle = static_cast<float>((static_cast<double>(low) + high) / 2);
    ASSERT_EQ(Bf16FromFloat(middle).bits, bits + bits % 2) << bits;
    ASSERT_EQ(Bf16FromFloat(std::nextafter(middle, 0.0f)).bits, bits) << bits;
    ASSERT_EQ(Bf16FromFloat(std::nextafter(middle, kInfinity)).bits, bits + 1) << bits;
  }
}

TEST(Bf16, KeepsNanAndInfinity) {
  uint32_t bits = 0x7f800001u;  // a NaN whose upper half alone would be infinity
  float nan;
  std::memcpy(&nan, &bits, sizeof(nan));
  EXPECT_TRUE(std::isnan(Bf16ToFloat(Bf16FromFloat(nan))));
  EXPECT_EQ(Bf16FromFloat(std::numeric_limits<float>::max()).bits, 0x7f80);
  EXPECT_EQ(Bf16FromFloat(-std::numeric_limits<float>::infinity()).bits, 0xff80);
}

}  // namespace
}  // namespace crumb::kernels
