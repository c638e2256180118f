// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "common/limited_log.h"

#include "common/recent_log.h"
#include "gtest/gtest.h"

namespace crumb {
namespace {

TEST(LogLimiterTest, AKindHasItsBurstAndThenOneLineInAnInterval) {
  LogLimiter limiter;
  const char kind = 'a', other = 'b';
  TimePoint now = TimePoint() + std::chrono::hours(1);
  uint64_t left_out = 0;
  for (int i = 0; i < LogLimiter::kBurst; ++i) ASSERT_TRUE(limiter.Admit(&kind, now, &left_out));
  for (int i = 0; i < 7; ++i) ASSERT_FALSE(limiter.Admit(&kind, now, &left_out));
  EXPECT_TRUE(limiter.Admit(&other, now, &left_out)) << "another kind has its own rate";
  EXPECT_EQ(left_out, 0u);
  now += LogLimiter::kInterval;
  EXPECT_TRUE(limiter.Admit(&kind, now, &left_out));
  EXPECT_EQ(left_out, 7u);
  EXPECT_FALSE(limiter.Admit(&kind, now, &left_out));
  EXPECT_EQ(limiter.left_out(), 8u);
  now += 1000 * LogLimiter::kBurst * LogLimiter::kInterval;
  for (int i = 0; i < LogLimiter::kBurst; ++i) ASSERT_TRUE(limiter.Admit(&kind, now, &left_out));
  EXPECT_FALSE(limiter.Admit(&kind, now, &left_out)) << "no more than a burst after a pause";
}

TEST(LimitedLogTest, LinesBeyondTheRateAreNotWritten) {
  const uint64_t before = RecentLog::Process().Count(Severity::kWarning);
  const uint64_t left_out_before = LogLimiter::Process().left_out();
  constexpr uint64_t kLines = 100'000;
  for (uint64_t i = 0; i < kLines; ++i) LogWarningLimited("line {} of a flood", i);
  const uint64_t written = RecentLog::Process().Count(Severity::kWarning) - before;
  EXPECT_GE(written, static_cast<uint64_t>(LogLimiter::kBurst));
  EXPECT_EQ(written + LogLimiter::Process().left_out() - left_out_before, kLines);
  EXPECT_LT(written, kLines / 10);
}

}  // namespace
}  // namespace crumb
