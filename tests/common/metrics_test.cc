// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "common/metrics.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <thread>
#include <vector>

namespace crumb {
namespace {

TEST(HistogramTest, BoundsAreInclusiveAbove) {
  const double bounds[] = {1.0, 2.0};
  Histogram histogram(bounds);
  for (const double value : {0.5, 1.0, 1.5, 2.0, 2.5, 100.0}) histogram.Observe(value);
  EXPECT_EQ(histogram.bucket(0), 2u);
  EXPECT_EQ(histogram.bucket(1), 2u);
  EXPECT_EQ(histogram.bucket(2), 2u);
  EXPECT_DOUBLE_EQ(histogram.sum(), 107.5);
}

TEST(HistogramTest, ThreadsLoseNothing) {
  Histogram histogram(LatencyBounds());
  Counter counter;
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 10000; ++i) {
        histogram.Observe(1.0);
        counter.Add(2);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_DOUBLE_EQ(histogram.sum(), 40000.0);
  EXPECT_EQ(counter.value(), 80000u);
}

TEST(HistogramTest, PublishedBoundsAscend) {
  EXPECT_TRUE(std::is_sorted(LatencyBounds().begin(), LatencyBounds().end()));
  EXPECT_TRUE(std::is_sorted(LifetimeBounds().begin(), LifetimeBounds().end()));
}

}  // namespace
}  // namespace crumb
