// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "models/sampler.h"

#include <gtest/gtest.h>

#include <limits>
#include <vector>

namespace crumb::models {
namespace {

TEST(SamplerTest, TakesTheLargest) {
  EXPECT_EQ(GreedyToken(std::vector<float>{-3, -1, -2}), 1);
  EXPECT_EQ(GreedyToken(std::vector<float>{5}), 0);
}

TEST(SamplerTest, TakesTheFirstOfEquals) {
  EXPECT_EQ(GreedyToken(std::vector<float>{1, 4, 4, 2}), 1);
}

TEST(SamplerTest, PrefersNumbersToNan) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  EXPECT_EQ(GreedyToken(std::vector<float>{nan, -7, nan, -8}), 1);
}

}  // namespace
}  // namespace crumb::models
