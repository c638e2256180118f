// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "server/held_memory.h"

#include <atomic>
#include <cstring>
#include <thread>
#include <vector>

#include "gtest/gtest.h"

namespace crumb::server {
namespace {

PageKey Key(uint8_t number) {
  PageKey key;
  key.bytes[0] = number;
  return key;
}

class HeldMemoryTest : public testing::Test {
 protected:
  static std::vector<HeldMemory::PageBytes> Pages(int first, int count, uint64_t bytes = 10) {
    std::vector<HeldMemory::PageBytes> pages;
    for (int i = 0; i < count; ++i) pages.push_back({Key(static_cast<uint8_t>(first + i)), bytes});
    return pages;
  }

  static KeyspaceId Space() { return KeyspaceId(); }
  absl::StatusOr<HeldMemory::Lease> Lease(const std::string& tenant,
                                          std::span<const HeldMemory::PageBytes> pages) {
    return held_.TakeLease(tenant, Space(), pages);
  }
  absl::Status Pin(const std::string& tenant, const HeldMemory::PageBytes& page, TimePoint until) {
    return held_.Pin(tenant, Space(), page, until, [] { return true; });
  }
  void Unpin(const std::string& tenant, std::span<const PageKey> keys) {
    for (const PageKey& key : keys) held_.Unpin(tenant, Space(), key, [] {});
  }

  class ManualClock : public Clock {
   public:
    TimePoint Now() const override { return now; }
    TimePoint now{std::chrono::hours(1)};
  };

  ManualClock clock_;
  HeldMemory held_{100, 50, clock_};
};

TEST_F(HeldMemoryTest, ATenantKeepsItsPartAndNoMore) {
  auto lease = Lease("a", Pages(0, 5));
  ASSERT_TRUE(lease.ok());
  EXPECT_EQ(held_.used_by("a"), 50u);
  EXPECT_TRUE(absl::IsResourceExhausted(Lease("a", Pages(5, 1)).status()));
  EXPECT_TRUE(Lease("b", Pages(10, 2)).ok());
  lease->reset();
  EXPECT_EQ(held_.used(), 0u);
  EXPECT_TRUE(Lease("a", Pages(5, 5)).ok());
}

TEST_F(HeldMemoryTest, APageCountsOnceForItsTenant) {
  auto first = Lease("a", Pages(0, 5)).value();
  auto second = Lease("a", Pages(0, 5)).value();
  auto twice = Lease("a", std::vector<HeldMemory::PageBytes>(3, {Key(0), 10})).value();
  ASSERT_TRUE(Pin("a", {Key(1), 10}, clock_.now + std::chrono::hours(1)).ok());
  EXPECT_EQ(held_.used(), 50u);
  first.reset();
  second.reset();
  EXPECT_EQ(held_.used(), 20u) << "pages 0 and 1";
  twice.reset();
  EXPECT_EQ(held_.used(), 10u) << "the pinned one";
}

TEST_F(HeldMemoryTest, PinsEndByTimeByUnpinAndByReplacement) {
  const TimePoint soon = clock_.now + std::chrono::minutes(1);
  const TimePoint late = clock_.now + std::chrono::hours(1);
  for (int i = 0; i < 5; ++i) ASSERT_TRUE(Pin("a", Pages(i, 1)[0], soon).ok());
  EXPECT_TRUE(absl::IsResourceExhausted(Pin("a", Pages(9, 1)[0], soon)));
  ASSERT_TRUE(Pin("a", Pages(0, 1)[0], late).ok()) << "again, for longer";
  const PageKey keys[] = {Key(1), Key(77)};
  Unpin("a", keys);
  Unpin("stranger", keys);
  EXPECT_EQ(held_.used(), 40u);
  clock_.now = soon;
  EXPECT_TRUE(Pin("b", Pages(30, 1)[0], late).ok());
  EXPECT_EQ(held_.used_by("a"), 10u) << "page 0 alone";
  clock_.now = late;
  EXPECT_TRUE(Lease("b", Pages(40, 1)).ok());
  EXPECT_EQ(held_.used(), 0u);
}

TEST_F(HeldMemoryTest, APageThatGrewCountsForMore) {
  auto small = Lease("a", Pages(0, 1, 10)).value();
  auto large = Lease("a", Pages(0, 1, 30)).value();
  EXPECT_EQ(held_.used(), 30u);
  small.reset();
  large.reset();
  EXPECT_EQ(held_.used(), 0u);
}

TEST_F(HeldMemoryTest, WhatATenantHoldsCostsNothingAgainThoughItsPartShrank) {
  auto lease = Lease("a", Pages(0, 5)).value();
  auto other = Lease("b", Pages(10, 2)).value();  // a's part is 40 from here on
  EXPECT_TRUE(Lease("a", Pages(0, 5)).ok());
  EXPECT_TRUE(Pin("a", Pages(0, 1)[0], clock_.now + std::chrono::hours(1)).ok());
  EXPECT_FALSE(Lease("a", Pages(5, 1)).ok());
}

TEST_F(HeldMemoryTest, PagesOfOneKeyInTwoKeyspacesAreTwo) {
  KeyspaceId other;
  other.bytes[0] = 1;
  const TimePoint until = clock_.now + std::chrono::hours(1);
  ASSERT_TRUE(Pin("a", Pages(0, 1)[0], until).ok());
  ASSERT_TRUE(held_.Pin("a", other, Pages(0, 1)[0], until, [] { return true; }).ok());
  EXPECT_EQ(held_.used(), 20u);
  held_.Unpin("a", other, Key(0), [] {});
  EXPECT_EQ(held_.used(), 10u);
}

TEST_F(HeldMemoryTest, APinOfAPageThatLeftIsNotCounted) {
  const TimePoint until = clock_.now + std::chrono::hours(1);
  const HeldMemory::PageBytes page = Pages(0, 1)[0];
  EXPECT_FALSE(held_.has_pins());
  ASSERT_TRUE(held_.Pin("a", Space(), page, until, [] { return false; }).ok());
  EXPECT_EQ(held_.used(), 0u) << "it left before it was pinned";
  ASSERT_TRUE(Pin("a", page, until).ok());
  EXPECT_TRUE(held_.has_pins());
  held_.ForgetRemoved("a", Space(), page.key, [] { return true; });
  EXPECT_EQ(held_.used(), 10u) << "it is in another tier still";
  held_.ForgetRemoved("a", Space(), page.key, [] { return false; });
  EXPECT_EQ(held_.used(), 0u);
  EXPECT_FALSE(held_.has_pins());
}

// The pins in the store and those that are counted are the same, whatever two threads do.
TEST_F(HeldMemoryTest, PinsAndTheirCountChangeTogether) {
  const TimePoint until = clock_.now + std::chrono::hours(1);
  const HeldMemory::PageBytes page = Pages(0, 1)[0];
  std::atomic<bool> pinned = false;
  const auto use = [&] {
    for (int i = 0; i < 5'000; ++i) {
      ASSERT_TRUE(held_
                      .Pin("a", Space(), page, until,
                           [&] {
                             std::this_thread::yield();
                             pinned = true;
                             return true;
                           })
                      .ok());
      held_.Unpin("a", Space(), page.key, [&] {
        pinned = false;
        std::this_thread::yield();
      });
    }
  };
  std::thread other(use);
  use();
  other.join();
  EXPECT_FALSE(pinned);
  EXPECT_EQ(held_.used(), 0u);
}

TEST_F(HeldMemoryTest, ManyExpiredPinsEndPieceByPiece) {
  constexpr int kPins = 40'000;
  HeldMemory held(2 * kPins, 50, clock_);
  const TimePoint soon = clock_.now + std::chrono::minutes(1);
  const auto key = [](int number) {
    PageKey made;
    std::memcpy(made.bytes.data(), &number, sizeof(number));
    return made;
  };
  const auto pin = [&](const std::string& tenant, int number, TimePoint until) {
    return held.Pin(tenant, Space(), {key(number), 1}, until, [] { return true; });
  };
  for (int i = 0; i < kPins; ++i) ASSERT_TRUE(pin("a", i, soon).ok());
  clock_.now = soon;
  ASSERT_TRUE(pin("b", 0, soon + std::chrono::minutes(1)).ok());
  EXPECT_GT(held.used_by("a"), kPins / 2u) << "one call does not end them all";
  EXPECT_TRUE(pin("a", kPins, soon + std::chrono::minutes(1)).ok()) << "its room is there";
  std::vector<HeldMemory::PageBytes> all = {{key(0), kPins - 1}};
  EXPECT_TRUE(held.TakeLease("b", Space(), all).ok()) << "all of them make room";
}

}  // namespace
}  // namespace crumb::server
