// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "tools/progress_bar.h"
#include "tests/common/fake_clock.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <sstream>

namespace crumb::tools {
namespace {

using ::testing::HasSubstr;

TEST(ProgressBarTest, ShowsPartAndTimeLeft) {
  FakeClock clock;
  std::ostringstream out;
  ProgressBar bar("working", out, ProgressBar::Style::kTerminal, clock);
  bar.Show(0.0);
  EXPECT_THAT(out.str(), HasSubstr("\rworking [..............................]   0 %"));
  clock.Advance(std::chrono::seconds(30));
  bar.Show(0.1);
  EXPECT_THAT(out.str(), HasSubstr("[###...........................]  10 % 4:30 left"));
  const size_t before = out.str().size();
  bar.Show(0.2);  // too soon to draw again
  EXPECT_EQ(out.str().size(), before);
  clock.Advance(std::chrono::hours(2));
  bar.Show(1.0);
  EXPECT_THAT(out.str(), HasSubstr("100 % 2:00:30"));
  EXPECT_EQ(out.str().back(), '\n');
  const size_t end = out.str().size();
  bar.Show(1.0);
  EXPECT_EQ(out.str().size(), end);
}

TEST(ProgressBarTest, WritesFewLinesToALog) {
  FakeClock clock;
  std::ostringstream out;
  ProgressBar bar("working", out, ProgressBar::Style::kLog, clock);
  bar.Add(0.25);
  EXPECT_EQ(out.str(), "");  // nothing before the first 30 seconds
  clock.Advance(std::chrono::seconds(30));
  bar.Add(0.25);
  clock.Advance(std::chrono::seconds(10));
  bar.Add(0.25);
  bar.Add(0.25);
  bar.End();
  EXPECT_EQ(out.str(), "working: 50 %, 0:30 left\nworking: 100 %, 0:40\n");
}

TEST(ProgressBarTest, QuietWritesNothing) {
  FakeClock clock;
  std::ostringstream out;
  ProgressBar bar("working", out, ProgressBar::Style::kQuiet, clock);
  clock.Advance(std::chrono::hours(1));
  bar.Show(0.5);
  bar.Show(1.0);
  bar.End();
  EXPECT_EQ(out.str(), "");
}

TEST(ProgressBarTest, EndsTheLineOfWorkThatFailed) {
  FakeClock clock;
  std::ostringstream out;
  ProgressBar bar("working", out, ProgressBar::Style::kTerminal, clock);
  bar.End();
  EXPECT_EQ(out.str(), "");  // nothing was begun
  ProgressBar second("working", out, ProgressBar::Style::kTerminal, clock);
  second.Show(0.5);
  second.End();
  second.End();
  EXPECT_THAT(out.str(), testing::MatchesRegex("\r[^\n]*50 % [^\n]*\n"));
}

}  // namespace
}  // namespace crumb::tools
