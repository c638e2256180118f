// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "server/held_memory.h"

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

  class ManualClock : public Clock {
   public:
    TimePoint Now() const override { return now; }
    TimePoint now{std::chrono::hours(1)};
  };

  ManualClock clock_;
  HeldMemory held_{100, 50, clock_};
};

TEST_F(HeldMemoryTest, ATenantKeepsItsPartAndNoMore) {
  auto lease = held_.TakeLease("a", Pages(0, 5));
  ASSERT_TRUE(lease.ok());
  EXPECT_EQ(held_.used_by("a"), 50u);
  EXPECT_TRUE(absl::IsResourceExhausted(held_.TakeLease("a", Pages(5, 1)).status()));
  EXPECT_TRUE(held_.TakeLease("b", Pages(10, 2)).ok());
  lease->reset();
  EXPECT_EQ(held_.used(), 0u);
  EXPECT_TRUE(held_.TakeLease("a", Pages(5, 5)).ok());
}

TEST_F(HeldMemoryTest, APageCountsOnceForItsTenant) {
  auto first = held_.TakeLease("a", Pages(0, 5)).value();
  auto second = held_.TakeLease("a", Pages(0, 5)).value();
  auto twice = held_.TakeLease("a", std::vector<HeldMemory::PageBytes>(3, {Key(0), 10})).value();
  ASSERT_TRUE(held_.Pin("a", {Key(1), 10}, clock_.now + std::chrono::hours(1)).ok());
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
  for (int i = 0; i < 5; ++i) ASSERT_TRUE(held_.Pin("a", Pages(i, 1)[0], soon).ok());
  EXPECT_TRUE(absl::IsResourceExhausted(held_.Pin("a", Pages(9, 1)[0], soon)));
  ASSERT_TRUE(held_.Pin("a", Pages(0, 1)[0], late).ok()) << "again, for longer";
  const PageKey keys[] = {Key(1), Key(77)};
  held_.Unpin("a", keys);
  held_.Unpin("nobody", keys);
  EXPECT_EQ(held_.used(), 40u);
  clock_.now = soon;
  EXPECT_TRUE(held_.Pin("b", Pages(30, 1)[0], late).ok());
  EXPECT_EQ(held_.used_by("a"), 10u) << "page 0 alone";
  clock_.now = late;
  EXPECT_TRUE(held_.TakeLease("b", Pages(40, 1)).ok());
  EXPECT_EQ(held_.used(), 0u);
}

TEST_F(HeldMemoryTest, APageThatGrewCountsForMore) {
  auto small = held_.TakeLease("a", Pages(0, 1, 10)).value();
  auto large = held_.TakeLease("a", Pages(0, 1, 30)).value();
  EXPECT_EQ(held_.used(), 30u);
  small.reset();
  large.reset();
  EXPECT_EQ(held_.used(), 0u);
}

}  // namespace
}  // namespace crumb::server
