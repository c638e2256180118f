// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "server/base/handshakes.h"

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace crumb::server {
namespace {

using testing::Optional;

constexpr unsigned kAnn = 1;
constexpr unsigned kBob = 2;
constexpr auto kGrace = std::chrono::milliseconds(250);
constexpr auto kTimeout = std::chrono::seconds(5);

TimePoint At(int ms) { return TimePoint() + std::chrono::milliseconds(ms); }

TEST(HandshakesTest, TheOldestIsLateAfterTheTimeout) {
  Handshakes waiting(4, kGrace, kTimeout);
  EXPECT_EQ(waiting.Late(At(100'000)), std::nullopt);
  EXPECT_EQ(waiting.NextLate(), TimePoint::max());
  waiting.Add(1, kAnn, At(0));
  waiting.Add(2, kBob, At(10));
  EXPECT_EQ(waiting.Late(At(4999)), std::nullopt);
  EXPECT_THAT(waiting.Late(At(5000)), Optional(1u));
  waiting.Remove(1);
  EXPECT_EQ(waiting.NextLate(), At(5010));
  waiting.Remove(1);
  waiting.Remove(7);
  EXPECT_EQ(waiting.NextLate(), At(5010));
}

TEST(HandshakesTest, AFloodTakesNoPlaceOfAnotherUser) {
  Handshakes waiting(4, kGrace, kTimeout);
  waiting.Add(1, kBob, At(0));
  for (uint64_t number = 2; number < 5; ++number) waiting.Add(number, kAnn, At(1));
  ASSERT_TRUE(waiting.full());
  for (uint64_t next = 5; next < 100; ++next) {
    const std::optional<uint64_t> closed = waiting.ToClose(At(4000));
    ASSERT_THAT(closed, Optional(next - 3));  // never Bob's, though it is the oldest
    waiting.Remove(*closed);
    waiting.Add(next, kAnn, At(1));
  }
}

TEST(HandshakesTest, NoConnectionGivesWayBeforeItsGraceIsOver) {
  Handshakes waiting(2, kGrace, kTimeout);
  waiting.Add(1, kAnn, At(0));
  EXPECT_FALSE(waiting.full());
  waiting.Add(2, kAnn, At(100));
  EXPECT_TRUE(waiting.full());
  EXPECT_EQ(waiting.ToClose(At(249)), std::nullopt);
  EXPECT_EQ(waiting.NextToClose(), At(250));
  EXPECT_THAT(waiting.ToClose(At(250)), Optional(1u));
  waiting.Remove(1);
  EXPECT_EQ(waiting.ToClose(At(300)), std::nullopt);
  EXPECT_FALSE(waiting.full());
}

TEST(HandshakesTest, OfUsersWithAsManyTheOldestGivesWay) {
  Handshakes waiting(2, kGrace, kTimeout);
  waiting.Add(1, kBob, At(0));
  waiting.Add(2, kAnn, At(0));
  EXPECT_THAT(waiting.ToClose(At(250)), Optional(1u));
}

}  // namespace
}  // namespace crumb::server
