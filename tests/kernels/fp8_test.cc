// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "kernels/fp8.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>

namespace crumb::kernels {
namespace {

TEST(Fp8Test, ValuesAreThoseOfE4m3) {
  EXPECT_EQ(Fp8ToFloat(0x00), 0.0f);
  EXPECT_EQ(Fp8ToFloat(0x01), 0x1p-9f);
  EXPECT_EQ(Fp8ToFloat(0x07), 7 * 0x1p-9f);
  EXPECT_EQ(Fp8ToFloat(0x08), 0x1p-6f);
  EXPECT_EQ(Fp8ToFloat(0x38), 1.0f);
  EXPECT_EQ(Fp8ToFloat(0xb9), -1.125f);
  EXPECT_EQ(Fp8ToFloat(0x7e), 448.0f);
  EXPECT_TRUE(std::isnan(Fp8ToFloat(0x7f)));
  EXPECT_TRUE(std::isnan(Fp8ToFloat(0xff)));
}

TEST(Fp8Test, EveryValueComesBack) {
  for (int code = 0; code < 256; ++code) {
    if ((code & 0x7f) == 0x7f) continue;
    EXPECT_EQ(Fp8FromFloat(Fp8ToFloat(static_cast<uint8_t>(code))), code) << code;
  }
}

// Compares with a search over all values; of two equally near ones the even code is right.
TEST(Fp8Test, RoundsToTheNearestEven) {
  std::mt19937 random(5);
  std::uniform_real_distribution<float> exponent(-12.0f, 9.5f);
  for (int round = 0; round < 20000; ++round) {
    float x = std::exp2(exponent(random));
    if (round % 4 == 0) {  // half way between two
      const auto code = static_cast<uint8_t>(random() % 0x7e);
      x = (Fp8ToFloat(code) + Fp8ToFloat(code + 1)) / 2;
    }
    uint8_t best = 0;
    for (uint8_t code = 1; code < 0x7f; ++code) {
      const float mine = std::abs(Fp8ToFloat(code) - x), other = std::abs(Fp8ToFloat(best) - x);
      if (mine < other || (mine == other && code % 2 == 0)) best = code;
    }
    EXPECT_EQ(Fp8FromFloat(x), best) << x;
    EXPECT_EQ(Fp8FromFloat(-x), best | 0x80) << x;
  }
}

TEST(Fp8Test, LimitsValuesAndKeepsNaN) {
  for (const float large : {449.0f, 464.0f, 1e9f, std::numeric_limits<float>::infinity()}) {
    EXPECT_EQ(Fp8FromFloat(large), 0x7e);
    EXPECT_EQ(Fp8FromFloat(-large), 0xfe);
  }
  EXPECT_EQ(Fp8FromFloat(NAN) & 0x7f, 0x7f);
  EXPECT_EQ(Fp8FromFloat(-0.0f), 0x80);
}

}  // namespace
}  // namespace crumb::kernels
