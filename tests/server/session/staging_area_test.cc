// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "server/session/staging_area.h"

#include <fcntl.h>
#include <unistd.h>

#include <map>
#include <random>

#include "gtest/gtest.h"

namespace crumb::server {
namespace {

TEST(StagingAreaTest, RandomUseNeverOverlapsAndComesBackWhole) {
  constexpr uint64_t kBytes = 1 << 20;
  constexpr unsigned kSeed = 4711;
  std::mt19937 random(kSeed);
  SCOPED_TRACE(kSeed);
  const auto area = StagingArea::Create(kBytes, 10'000).value();
  std::map<uint64_t, uint64_t> held;  // offset -> end
  for (int step = 0; step < 20'000; ++step) {
    if (held.empty() || random() % 5 < 3) {
      const uint64_t bytes = 1 + random() % 20'000;
      uint64_t offset = 0;
      if (!area->Reserve(bytes, offset)) continue;
      ASSERT_EQ(offset % StagingArea::kAlignment, 0u);
      ASSERT_LE(offset + bytes, kBytes);
      const auto next = held.lower_bound(offset);
      ASSERT_TRUE(next == held.end() || next->first >= offset + bytes);
      ASSERT_TRUE(next == held.begin() || std::prev(next)->second <= offset);
      held[offset] = offset + bytes;
    } else {
      const auto victim = std::next(held.begin(), static_cast<long>(random() % held.size()));
      if (random() % 2 == 0) {
        ASSERT_TRUE(area->Abort(victim->first));
      } else {
        const auto piece = StagingArea::Take(area, victim->first);
        ASSERT_NE(piece, nullptr);
        ASSERT_EQ(piece->bytes().size(), victim->second - victim->first);
      }
      held.erase(victim);
    }
    ASSERT_EQ(area->reservations(), held.size());
  }
  while (!held.empty()) {
    ASSERT_TRUE(area->Abort(held.begin()->first));
    held.erase(held.begin());
  }
  EXPECT_EQ(area->free_bytes(), kBytes);
  uint64_t offset = 1;
  EXPECT_TRUE(area->Reserve(kBytes, offset));  // one piece again
  EXPECT_EQ(offset, 0u);
}

TEST(StagingAreaTest, APieceInCommitCannotBeReservedAgain) {
  const auto area = StagingArea::Create(4096, 8).value();
  uint64_t offset = 0;
  ASSERT_TRUE(area->Reserve(1000, offset));
  auto piece = StagingArea::Take(area, offset);
  ASSERT_NE(piece, nullptr);
  EXPECT_EQ(StagingArea::Take(area, offset), nullptr);
  EXPECT_FALSE(area->Abort(offset));
  EXPECT_EQ(area->free_bytes(), 4096u - 1024u);
  piece.reset();
  EXPECT_EQ(area->free_bytes(), 4096u);
  EXPECT_FALSE(area->Abort(offset));
}

TEST(StagingAreaTest, RoomThatIsUsedAgainIsAnotherReservation) {
  const auto area = StagingArea::Create(4096, 8).value();
  uint64_t offset = 0;
  ASSERT_TRUE(area->Reserve(4096, offset, 1));
  EXPECT_TRUE(area->Abort(offset, 1));
  ASSERT_TRUE(area->Reserve(4096, offset, 2));
  EXPECT_FALSE(area->Abort(offset, 1));
  EXPECT_EQ(StagingArea::Take(area, offset, 1), nullptr);
  area->GiveUp(1);
  area->GiveUp(0);
  EXPECT_EQ(area->reservations(), 1u);
  EXPECT_NE(StagingArea::Take(area, offset, 2), nullptr);
  EXPECT_EQ(area->reservations(), 0u);
}

TEST(StagingAreaTest, AReserveThatWasGivenUpKeepsNoRoom) {
  const auto area = StagingArea::Create(4096, 8).value();
  uint64_t offset = 0;
  uint64_t committed = 0;
  uint64_t other = 0;
  ASSERT_TRUE(area->Reserve(512, offset, 7));
  ASSERT_TRUE(area->Reserve(512, committed, 7));
  ASSERT_TRUE(area->Reserve(512, other, 8));
  auto piece = StagingArea::Take(area, committed, 7);
  area->GiveUp(7);
  EXPECT_EQ(area->reservations(), 2u) << "one is being committed, one is another call's";
  EXPECT_FALSE(area->Reserve(512, offset, 7)) << "the rest of the call comes later";
  piece.reset();
  EXPECT_EQ(area->reservations(), 1u);
  for (uint64_t i = 0; i < 2 * StagingArea::kGivenUpMax; ++i) area->GiveUp(100 + i);
  EXPECT_TRUE(area->Reserve(512, offset, 7)) << "numbers are remembered up to a bound";
  EXPECT_FALSE(area->Reserve(512, offset, 99 + 2 * StagingArea::kGivenUpMax));
  EXPECT_TRUE(area->Reserve(512, offset)) << "a call without a number";
}

TEST(StagingAreaTest, SizesOutOfBoundsAreRefused) {
  const auto area = StagingArea::Create(4096, 8).value();
  uint64_t offset = 0;
  EXPECT_FALSE(area->Reserve(0, offset));
  EXPECT_FALSE(area->Reserve(4097, offset));
  EXPECT_FALSE(area->Reserve(UINT64_MAX, offset));
  EXPECT_EQ(area->reservations(), 0u);
}

TEST(StagingAreaTest, TheNumberOfReservationsIsBounded) {
  const auto area = StagingArea::Create(1 << 20, 3).value();
  uint64_t offset = 0;
  for (int i = 0; i < 3; ++i) EXPECT_TRUE(area->Reserve(1, offset));
  EXPECT_FALSE(area->Reserve(1, offset));
}

TEST(StagingAreaTest, TheWorkerCannotChangeTheFilesSize) {
  const auto area = StagingArea::Create(8192, 8).value();
  EXPECT_NE(::ftruncate(area->fd(), 4096), 0);
  EXPECT_NE(::ftruncate(area->fd(), 16384), 0);
  EXPECT_NE(::fcntl(area->fd(), F_ADD_SEALS, F_SEAL_WRITE), 0);
}

}  // namespace
}  // namespace crumb::server
