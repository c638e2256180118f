// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "bench/statistics.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>

namespace crumb::bench {
namespace {

TEST(StatisticsTest, EstimatesTheMeanAndItsError) {
  const Estimate estimate = EstimateOf({1.0, 2.0, 3.0, 6.0});
  EXPECT_DOUBLE_EQ(estimate.mean, 3.0);
  EXPECT_DOUBLE_EQ(estimate.error, std::sqrt((4.0 + 1.0 + 0.0 + 9.0) / 3 / 4));
  EXPECT_EQ(EstimateOf({5.0}).error, 0.0);
  EXPECT_EQ(EstimateOf({}).mean, 0.0);
}

TEST(StatisticsTest, ProportionalColumnsHaveNoSpread) {
  const Interval ratio = BootstrapRatio({1.0, 2.0, 8.0}, {2.0, 4.0, 16.0});
  EXPECT_DOUBLE_EQ(ratio.value, 0.5);
  EXPECT_DOUBLE_EQ(ratio.low, 0.5);
  EXPECT_DOUBLE_EQ(ratio.high, 0.5);
}

// With two entries a draw is the first twice, both, or the second twice, with 1/4, 1/2, 1/4.
TEST(StatisticsTest, TwoEntriesReachBothEnds) {
  const Interval ratio = BootstrapRatio({1.0, 3.0}, {1.0, 1.0});
  EXPECT_DOUBLE_EQ(ratio.value, 2.0);
  EXPECT_DOUBLE_EQ(ratio.low, 1.0);
  EXPECT_DOUBLE_EQ(ratio.high, 3.0);
}

// For the mean of many normal values the interval is the mean and 1.96 standard errors.
TEST(StatisticsTest, AgreesWithTheNormalInterval) {
  std::mt19937 random(7);
  std::normal_distribution<double> normal(10.0, 2.0);
  std::vector<double> values, ones;
  for (int i = 0; i < 400; ++i) {
    values.push_back(normal(random));
    ones.push_back(1.0);
  }
  const Interval interval = BootstrapRatio(values, ones);
  const Estimate estimate = EstimateOf(values);
  EXPECT_NEAR(interval.value, estimate.mean, 1e-9);
  EXPECT_NEAR(interval.low, estimate.mean - 1.96 * estimate.error, 0.1 * estimate.error);
  EXPECT_NEAR(interval.high, estimate.mean + 1.96 * estimate.error, 0.1 * estimate.error);
}

// A pair that moves together has a narrow ratio, however wide each side is.
TEST(StatisticsTest, PairsAreDrawnTogether) {
  std::vector<double> ours, theirs, shuffled;
  for (int i = 0; i < 64; ++i) {
    theirs.push_back(i % 2 == 0 ? 1.0 : 100.0);
    ours.push_back(theirs.back() * 0.3);
    shuffled.push_back((i / 2) % 2 == 0 ? 0.3 : 30.0);
  }
  const Interval paired = BootstrapRatio(ours, theirs);
  const Interval unpaired = BootstrapRatio(shuffled, theirs);
  EXPECT_LT(paired.high - paired.low, 1e-9);
  EXPECT_GT(unpaired.high - unpaired.low, 0.05);
}

}  // namespace
}  // namespace crumb::bench
