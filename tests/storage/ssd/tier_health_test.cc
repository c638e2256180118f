// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "storage/ssd/tier_health.h"

#include "gtest/gtest.h"
#include "tests/common/fake_clock.h"

namespace crumb::storage {
namespace {

using Operation = TierHealth::Operation;

TEST(TierHealth, AFailedWriteMakesItReadOnlyForAWhile) {
  FakeClock clock;
  TierHealth health("tier", clock);
  EXPECT_EQ(health.State(), "active");
  health.Failed(Operation::kWrite, absl::ResourceExhaustedError("disk full"));
  EXPECT_TRUE(absl::IsUnavailable(health.Check(Operation::kWrite)));
  EXPECT_TRUE(health.Check(Operation::kRead).ok());
  EXPECT_EQ(health.State(), "read-only: disk full");
  clock.Advance(std::chrono::seconds(5));
  EXPECT_TRUE(health.Check(Operation::kWrite).ok());
  // The next failure in a row pauses longer, up to a bound.
  health.Failed(Operation::kWrite, absl::ResourceExhaustedError("disk full"));
  clock.Advance(std::chrono::seconds(9));
  EXPECT_FALSE(health.Check(Operation::kWrite).ok());
  clock.Advance(std::chrono::seconds(1));
  EXPECT_TRUE(health.Check(Operation::kWrite).ok());
  for (int i = 0; i < 100; ++i) health.Failed(Operation::kWrite, absl::InternalError("x"));
  clock.Advance(std::chrono::minutes(5));
  EXPECT_TRUE(health.Check(Operation::kWrite).ok());
  health.Succeeded(Operation::kWrite);
  EXPECT_EQ(health.State(), "active");
}

TEST(TierHealth, ReadsThatFailAgainAndAgainTurnItOff) {
  FakeClock clock;
  TierHealth health("tier", clock);
  for (int i = 0; i < 7; ++i) health.Failed(Operation::kRead, absl::InternalError("bad sector"));
  EXPECT_TRUE(health.Check(Operation::kRead).ok());
  health.Failed(Operation::kRead, absl::InternalError("bad sector"));
  EXPECT_FALSE(health.Check(Operation::kRead).ok());
  EXPECT_FALSE(health.Check(Operation::kWrite).ok());
  EXPECT_EQ(health.State(), "off: bad sector");
  clock.Advance(std::chrono::minutes(5));
  EXPECT_TRUE(health.Check(Operation::kRead).ok());
  health.Succeeded(Operation::kRead);
  EXPECT_EQ(health.State(), "active");
}

}  // namespace
}  // namespace crumb::storage
