// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "server/metrics/reported_amounts.h"

#include <limits>

#include "gtest/gtest.h"

namespace crumb::server {
namespace {

constexpr TimePoint kStart = TimePoint() + std::chrono::hours(1);

TEST(ReportedAmountsTest, OrdinaryAmountsCountInFull) {
  ReportedAmounts amounts;
  TimePoint now = kStart;
  for (int second = 0; second < 10'000; ++second) {
    now += std::chrono::seconds(1);
    ASSERT_EQ(amounts.Admit("a", Reported::kUsedTokens, 1'000'000, now), 1'000'000u);
  }
  now += std::chrono::hours(1);
  EXPECT_EQ(amounts.Admit("a", Reported::kUsedTokens, 3'600'000'000, now), 3'600'000'000u)
      << "what was saved while crumbd was away";
  EXPECT_EQ(amounts.cut(), 0u);
}

TEST(ReportedAmountsTest, ForgedAmountsAreCutForTheirTenantAlone) {
  ReportedAmounts amounts;
  constexpr uint64_t kForged = std::numeric_limits<uint64_t>::max();
  const uint64_t first = amounts.Admit("a", Reported::kVerifyFailures, kForged, kStart);
  EXPECT_LE(first, 1'000'000'000u);
  EXPECT_EQ(amounts.Admit("a", Reported::kVerifyFailures, kForged, kStart), 0u);
  EXPECT_EQ(amounts.cut(), 2u);
  EXPECT_EQ(amounts.Admit("b", Reported::kVerifyFailures, 5, kStart), 5u);
  EXPECT_EQ(amounts.Admit("a", Reported::kUsedTokens, 5, kStart), 5u) << "another kind";
  const auto index = static_cast<size_t>(Reported::kVerifyFailures);
  EXPECT_EQ(amounts.CountedOf("a")[index], first) << "what was left out counts nowhere";
  EXPECT_EQ(amounts.CountedOf("b")[index], 5u);
  EXPECT_EQ(amounts.CountedOf("c")[index], 0u);
  EXPECT_GT(amounts.Admit("a", Reported::kVerifyFailures, 5, kStart + std::chrono::seconds(1)), 0u);
}

}  // namespace
}  // namespace crumb::server
