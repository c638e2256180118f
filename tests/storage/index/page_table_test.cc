// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "storage/index/page_table.h"

#include "gtest/gtest.h"
#include "tests/storage/index/page_table_fixture.h"

namespace crumb::storage {
namespace {

TEST_F(PageTableTest, APageHasNoMoreFragmentsThanItMay) {
  table_.SetPageFragmentsMax(2);
  SampleFragment sample = SamplePage(1, 0);
  for (uint16_t head = 0; head < 3; ++head) {
    sample.range.heads = {head, static_cast<uint16_t>(head + 1)};
    EXPECT_EQ(Insert(sample).status().code(),
              head < 2 ? absl::StatusCode::kOk : absl::StatusCode::kResourceExhausted);
  }
}

TEST_F(PageTableTest, ReferredSlotsOutliveTheirPage) {
  const auto page = Insert(SamplePage(1, 0));
  ASSERT_TRUE(page.ok());
  table_.Ref(*page);
  table_.Ref(*page);
  table_.Remove(*page, RemovalReason::kDeleted, kNow);
  EXPECT_EQ(table_.pages().Find(SampleKeyspace(0), SampleKey(1, 0)), kNoPage);
  EXPECT_GT(slots_.used_bytes(), 0u);
  table_.Unref(*page);
  EXPECT_GT(slots_.used_bytes(), 0u);
  table_.Unref(*page);
  EXPECT_EQ(slots_.used_bytes(), 0u);
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
  EXPECT_EQ(table_.pages().PagesOlderThan(sample.keyspace, 7).size(), 1u);
  EXPECT_TRUE(absl::IsAborted(Insert(sample).status()));
}

}  // namespace
}  // namespace crumb::storage
