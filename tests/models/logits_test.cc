// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "models/logits.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>
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

TEST(LogitMetricsTest, KlOfTwoCoins) {
  // The softmax is (1/4, 3/4) and (1/2, 1/2).
  const std::vector<float> p = {0.0f, std::log(3.0f)};
  const std::vector<float> q = {7.0f, 7.0f};
  EXPECT_NEAR(KlDivergence(p, q), 0.25 * std::log(0.5) + 0.75 * std::log(1.5), 1e-7);
  EXPECT_NEAR(KlDivergence(q, p), 0.5 * std::log(2.0) + 0.5 * std::log(2.0 / 3.0), 1e-7);
}

TEST(LogitMetricsTest, KlIgnoresAConstantAndIsNeverNegative) {
  const uint32_t seed = std::random_device{}();
  SCOPED_TRACE(testing::Message() << "seed " << seed);
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0.0f, 3.0f);
  for (int round = 0; round < 100; ++round) {
    std::vector<float> p(50), q(50), shifted(50);
    for (int i = 0; i < 50; ++i) {
      p[i] = normal(random);
      q[i] = normal(random);
      shifted[i] = p[i] + 64.0f;
    }
    EXPECT_GT(KlDivergence(p, q), 0.0);
    EXPECT_GE(KlDivergence(p, shifted), 0.0);
    EXPECT_LT(KlDivergence(p, shifted), 1e-5);
    EXPECT_EQ(KlDivergence(p, p), 0.0);
  }
}

TEST(LogitMetricsTest, LargeLogitsDoNotOverflow) {
  EXPECT_NEAR(KlDivergence(std::vector<float>{1e4f, 0.0f}, std::vector<float>{1e4f, 9990.0f}),
              std::log1p(std::exp(-10.0)), 1e-9);
}

TEST(LogitMetricsTest, NanIsNotHidden) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  EXPECT_TRUE(std::isnan(KlDivergence(std::vector<float>{0, 1}, std::vector<float>{0, nan})));
}

TEST(LogitMetricsTest, ComparesRowByRow) {
  const Logits a = {2, 2, {0, 1, 5, 0}};
  const Logits b = {2, 2, {1, 0, 5, 0}};
  const LogitAgreement agreement = CompareLogits(a, b);
  EXPECT_EQ(agreement.rows, 2);
  EXPECT_DOUBLE_EQ(agreement.top1, 0.5);
  EXPECT_DOUBLE_EQ(agreement.max_kl, KlDivergence(a.row(0), b.row(0)));
  EXPECT_DOUBLE_EQ(agreement.mean_kl, agreement.max_kl / 2);
  EXPECT_EQ(CompareLogits({}, {}).rows, 0);
}

}  // namespace

}  // namespace crumb::models
