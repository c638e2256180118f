// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "common/recent_log.h"

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace crumb {
namespace {

TEST(RecentLogTest, KeepsTheNewestProblemsOnly) {
  RecentLog log;
  log.Add(Severity::kInfo, "nothing");
  for (size_t i = 0; i < RecentLog::kProblemsMax + 10; ++i) {
    log.Add(i % 2 == 0 ? Severity::kWarning : Severity::kError, std::to_string(i));
  }
  const auto problems = log.Problems();
  ASSERT_EQ(problems.size(), RecentLog::kProblemsMax);
  EXPECT_EQ(problems.front().text, "10");
  EXPECT_EQ(problems.back().text, std::to_string(RecentLog::kProblemsMax + 9));
  EXPECT_EQ(problems.back().severity, Severity::kError);
  EXPECT_EQ(log.Count(Severity::kWarning), (RecentLog::kProblemsMax + 10) / 2);
  EXPECT_EQ(log.Count(Severity::kError), (RecentLog::kProblemsMax + 10) / 2);
  EXPECT_EQ(log.Count(Severity::kInfo), 0u);
}

TEST(RecentLogTest, CutsLongLines) {
  RecentLog log;
  log.Add(Severity::kError, std::string(10'000, 'x'));
  EXPECT_EQ(log.Problems().front().text.size(), RecentLog::kTextBytesMax);
}

TEST(RecentLogTest, TheProcessLogHoldsWhatWasWrittenAndNoMore) {
  const uint64_t before = RecentLog::Process().Count(Severity::kWarning);
  LogWarning("disk {} is slow", 3);
  EXPECT_EQ(RecentLog::Process().Count(Severity::kWarning), before + 1);
  EXPECT_EQ(RecentLog::Process().Problems().back().text, "disk 3 is slow");
  SetLogSeverity(Severity::kOff);
  LogError("no reader wants to know");
  SetLogSeverity(Severity::kInfo);
  EXPECT_EQ(RecentLog::Process().Count(Severity::kWarning), before + 1);
  EXPECT_EQ(RecentLog::Process().Problems().back().text, "disk 3 is slow");
}

}  // namespace
}  // namespace crumb
