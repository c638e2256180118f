// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "storage/page_table.h"

#include "gtest/gtest.h"
#include "storage/policy/policy.h"
#include "tests/storage/sample_fragment.h"

namespace crumb::storage {
namespace {

constexpr TimePoint kNow{};
bool AnyPage(const Page&) { return true; }

class PageTableTest : public testing::Test {
 protected:
  PageTableTest() { table_.slots().AddRegion(0, uint64_t{8} << 20); }

  absl::StatusOr<PageHandle> Insert(const SampleFragment& sample) {
    const FragmentMeta meta = MetaOf(sample);
    const auto slot = table_.slots().Allocate(meta.bytes, SlotAllocator::kNoOwner);
    auto page = table_.Insert(meta, *slot, Below::kAbsent, kNow);
    if (!page.ok()) table_.slots().Free(*slot);
    return page;
  }

  PageTable table_{*MakePolicy("lru", 1000), {.granule_bytes = 512, .page_bytes = 512}};
};

TEST_F(PageTableTest, LeavesGoBeforeTheirAncestorsInWhateverOrderTheyCame) {
  for (const uint64_t number : {2, 0, 3, 1}) ASSERT_TRUE(Insert(SamplePage(1, number)).ok());
  for (const uint64_t number : {3, 2, 1, 0}) {
    const auto victim = table_.Victim(kNow, AnyPage);
    ASSERT_TRUE(victim);
    EXPECT_EQ(table_[*victim].key, SampleKey(1, number));
    table_.Remove(*victim, RemovalReason::kCapacity, kNow);
  }
  EXPECT_FALSE(table_.Victim(kNow, AnyPage));
  EXPECT_EQ(table_.slots().used_bytes(), 0u);
}

TEST_F(PageTableTest, AParentThatComesBackIsAParentAgain) {
  for (uint64_t number = 0; number < 3; ++number) ASSERT_TRUE(Insert(SamplePage(1, number)).ok());
  table_.Remove(table_.Find(SampleKeyspace(0), SampleKey(1, 1)), RemovalReason::kDeleted, kNow);
  ASSERT_TRUE(Insert(SamplePage(1, 1)).ok());
  const auto victim = table_.Victim(kNow, AnyPage);
  ASSERT_TRUE(victim);
  EXPECT_EQ(table_[*victim].key, SampleKey(1, 2));
}

TEST_F(PageTableTest, ARingOfParentsCanStillBeEvicted) {
  for (uint64_t i = 0; i < 3; ++i) {
    SampleFragment sample = SamplePage(1, i);
    sample.parent = SampleKey(1, (i + 1) % 3);
    ASSERT_TRUE(Insert(sample).ok());
  }
  SampleFragment own_parent = SamplePage(2, 0);
  own_parent.parent = own_parent.key;
  ASSERT_TRUE(Insert(own_parent).ok());
  for (int i = 0; i < 4; ++i) {
    const auto victim = table_.Victim(kNow, AnyPage);
    ASSERT_TRUE(victim);
    table_.Remove(*victim, RemovalReason::kCapacity, kNow);
  }
}

TEST_F(PageTableTest, ReferredSlotsOutliveTheirPage) {
  const auto page = Insert(SamplePage(1, 0));
  ASSERT_TRUE(page.ok());
  table_.Ref(*page);
  table_.Ref(*page);
  table_.Remove(*page, RemovalReason::kDeleted, kNow);
  EXPECT_EQ(table_.Find(SampleKeyspace(0), SampleKey(1, 0)), kNoPage);
  EXPECT_GT(table_.slots().used_bytes(), 0u);
  table_.Unref(*page);
  EXPECT_GT(table_.slots().used_bytes(), 0u);
  table_.Unref(*page);
  EXPECT_EQ(table_.slots().used_bytes(), 0u);
  EXPECT_EQ(table_.Stats().waste_bytes, 0u);
  EXPECT_EQ(table_.Stats().resident_logical_bytes, 0u);
}

TEST_F(PageTableTest, FragmentsOfAPageNeverOverlap) {
  SampleFragment left = SamplePage(1, 0);
  left.range.heads = {0, 1};
  SampleFragment right = left;
  right.range.heads = {1, 2};
  const auto page = Insert(left);
  ASSERT_TRUE(page.ok());
  EXPECT_FALSE(table_[*page].Covers({{0, 2}, {0, 2}}));
  EXPECT_TRUE(absl::IsAlreadyExists(Insert(SamplePage(1, 0)).status()));
  EXPECT_EQ(*Insert(right), *page);
  EXPECT_TRUE(table_[*page].Covers({{0, 2}, {0, 2}}));
  EXPECT_TRUE(absl::IsAlreadyExists(Insert(right).status()));
  EXPECT_EQ(table_.Stats().pages, 1u);
}

TEST_F(PageTableTest, NewerGenerationsReplaceOlderOnes) {
  SampleFragment sample = SamplePage(1, 0);
  sample.generation = 5;
  ASSERT_TRUE(Insert(sample).ok());
  sample.generation = 4;
  EXPECT_TRUE(absl::IsAborted(Insert(sample).status()));
  sample.generation = 6;
  const auto page = Insert(sample);
  ASSERT_TRUE(page.ok());
  EXPECT_EQ(table_[*page].generation, 6u);
  EXPECT_EQ(table_.Stats().pages, 1u);
  table_.RaiseGeneration(sample.keyspace, 7);
  EXPECT_EQ(table_.PagesBelow(sample.keyspace, 7).size(), 1u);
  EXPECT_TRUE(absl::IsAborted(Insert(sample).status()));
}

TEST_F(PageTableTest, PinsEnd) {
  const auto page = Insert(SamplePage(1, 0));
  ASSERT_TRUE(page.ok());
  table_[*page].pinned_until = kNow + std::chrono::seconds(5);
  EXPECT_FALSE(table_.Victim(kNow, AnyPage));
  EXPECT_TRUE(table_.Victim(kNow + std::chrono::seconds(5), AnyPage));
}

}  // namespace
}  // namespace crumb::storage
