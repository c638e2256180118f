// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "storage/index/page_entries.h"

#include <set>

#include "gtest/gtest.h"
#include "tests/storage/index/page_table_fixture.h"

namespace crumb::storage {
namespace {

using PageEntriesTest = PageTableTest;

TEST_F(PageEntriesTest, AWalkInPiecesSeesEveryPageOnce) {
  constexpr uint64_t kPages = 100;
  for (uint64_t i = 0; i < kPages; ++i) {
    SampleFragment sample = SamplePage(1, i);
    ASSERT_TRUE(Insert(sample).ok());
    sample.keyspace = SampleKeyspace(1);
    ASSERT_TRUE(Insert(sample).ok());
  }
  for (const size_t piece : {size_t{7}, size_t{100}, size_t{1000}}) {
    std::multiset<PageKey> seen;
    size_t pieces = 0;
    for (PageHandle next = 0; next != kNoPage; ++pieces) {
      next = table_.pages().Scan(SampleKeyspace(1), next, piece,
                                 [&](PageHandle handle, const Page& page) {
                                   EXPECT_EQ(page.keyspace, SampleKeyspace(1));
                                   EXPECT_EQ(&table_[handle], &page);
                                   seen.insert(page.key);
                                 });
    }
    EXPECT_EQ(seen.size(), kPages);
    EXPECT_EQ(std::set<PageKey>(seen.begin(), seen.end()).size(), kPages);
    EXPECT_EQ(pieces == 1, piece >= kPages);
  }
  EXPECT_EQ(table_.pages().Scan(SampleKeyspace(7), 0, 10, [](PageHandle, const Page&) { FAIL(); }),
            kNoPage);
}

}  // namespace
}  // namespace crumb::storage
