// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "transport/progress_thread.h"

#include <gtest/gtest.h>

namespace crumb::transport {
namespace {

using std::chrono::microseconds;

TEST(PollTimeTest, GrowsToItsMostWhileSleepsAreShort) {
  PollTime time(microseconds(100));
  EXPECT_EQ(time.now(), Duration::zero());
  for (const int expected : {10, 20, 40, 80, 100, 100}) {
    time.NoteSleep(microseconds(99));
    EXPECT_EQ(time.now(), microseconds(expected));
  }
}

TEST(PollTimeTest, ShrinksToNothingWhileSleepsAreLong) {
  PollTime time(microseconds(100));
  for (int i = 0; i < 9; ++i) time.NoteSleep(Duration::zero());
  for (const int expected : {50, 25, 12, 0, 0}) {
    time.NoteSleep(microseconds(100));
    EXPECT_EQ(std::chrono::floor<microseconds>(time.now()), microseconds(expected));
  }
  time.NoteSleep(microseconds(1));
  EXPECT_EQ(time.now(), microseconds(10));
}

TEST(PollTimeTest, ZeroStaysZero) {
  PollTime time(Duration::zero());
  for (int i = 0; i < 9; ++i) time.NoteSleep(Duration::zero());
  EXPECT_EQ(time.now(), Duration::zero());
}

}  // namespace
}  // namespace crumb::transport
