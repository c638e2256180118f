// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "storage/index/held_pages.h"

#include "gtest/gtest.h"
#include "tests/storage/index/page_table_fixture.h"

namespace crumb::storage {
namespace {

using HeldPagesTest = PageTableTest;

TEST_F(HeldPagesTest, ExpiredPinsEndPieceByPiece) {
  table_.held().SetBound(uint64_t{8} << 20, 50);
  table_.held().SetTenant(SampleKeyspace(0), "a");
  constexpr uint64_t kPages = 10;
  const TimePoint soon = kNow + std::chrono::minutes(1);
  uint64_t bytes = 0;
  for (uint64_t sequence = 0; sequence < kPages; ++sequence) {
    const auto page = Insert(SamplePage(sequence, 0));
    ASSERT_TRUE(page.ok());
    bytes = table_[*page].slots_bytes;
    ASSERT_TRUE(table_.held().Pin(SampleKeyspace(0), SampleKey(sequence, 0), 0, soon));
  }
  EXPECT_EQ(table_.held().bytes(), kPages * bytes);
  EXPECT_EQ(table_.held().ExpirePins(kNow, kPages), 0u);
  const TimePoint late = soon + std::chrono::hours(1);
  ASSERT_TRUE(table_.held().Pin(SampleKeyspace(0), SampleKey(0, 0), 0, late))
      << "again, for longer";
  table_.held().Unpin(SampleKeyspace(0), SampleKey(1, 0));
  table_.held().Unpin(SampleKeyspace(0), SampleKey(77, 0));
  EXPECT_EQ(table_.held().bytes(), (kPages - 1) * bytes);
  EXPECT_EQ(table_.held().ExpirePins(soon, 3), 3u);
  EXPECT_EQ(table_.held().bytes(), (kPages - 4) * bytes);
  EXPECT_EQ(table_.held().ExpirePins(soon, kPages), kPages - 5);
  EXPECT_EQ(table_.held().bytes(), bytes) << "page 0 alone";
  ASSERT_TRUE(
      table_.Hold(table_.pages().Find(SampleKeyspace(0), SampleKey(0, 0)), /*bounded=*/true));
  EXPECT_EQ(table_.held().ExpirePins(late, kPages), 1u);
  EXPECT_EQ(table_.held().bytes(), bytes) << "it is leased";
  table_.Unhold(table_.pages().Find(SampleKeyspace(0), SampleKey(0, 0)));
  EXPECT_EQ(table_.held().bytes(), 0u);
}

// A pin of a page that the tier below has, and the fragments that come afterwards.
TEST_F(HeldPagesTest, APinBelowCountsWhatIsCommittedToItsPage) {
  table_.held().SetBound(uint64_t{8} << 20, 50);
  table_.held().SetTenant(SampleKeyspace(0), "a");
  const TimePoint until = kNow + std::chrono::hours(1);
  ASSERT_TRUE(table_.held().Pin(SampleKeyspace(0), SampleKey(1, 0), 1000, until));
  EXPECT_EQ(table_.held().bytes(), 1000u);
  const auto page = Insert(SamplePage(1, 0));
  ASSERT_TRUE(page.ok());
  EXPECT_EQ(table_.held().bytes(), 1000 + table_[*page].slots_bytes);
  table_.held().ForgetBelow(SampleKeyspace(0), SampleKey(1, 0));
  EXPECT_EQ(table_.held().bytes(), 0u);
}

}  // namespace
}  // namespace crumb::storage
