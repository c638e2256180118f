// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "client/worker/page_table.h"

#include <atomic>
#include <thread>

#include "common/placement.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace crumb::client {
namespace {

PageKey Key(size_t number) {
  PageKey key;
  key.bytes[0] = static_cast<uint8_t>(number);
  key.bytes[1] = static_cast<uint8_t>(number >> 8);
  return key;
}

std::shared_ptr<Page> MakePage(size_t number, uint64_t generation = 1) {
  auto page = std::make_shared<Page>();
  page->key = Key(number);
  page->generation = generation;
  return page;
}

TEST(PageTableTest, APageIsFoundAsLongAsOneReferenceLives) {
  PageTable table;
  auto page = MakePage(1);
  const std::weak_ptr<const Page> watched = page;
  auto shared = table.Share(std::move(page));
  auto second = table.Find(Key(1));
  EXPECT_EQ(second, shared);
  EXPECT_EQ(table.Find(Key(2)), nullptr);
  shared.reset();
  EXPECT_EQ(table.Find(Key(1)), second);
  second.reset();
  EXPECT_EQ(table.Find(Key(1)), nullptr);
  EXPECT_EQ(table.size(), 0u) << "a dead page leaves no entry";
  EXPECT_TRUE(watched.expired()) << "the table owns no page";
}

TEST(PageTableTest, WrapMakesNothingFindable) {
  PageTable table;
  const auto wrapped = table.Wrap(MakePage(1));
  EXPECT_EQ(table.Find(Key(1)), nullptr);
  table.Insert(wrapped);
  EXPECT_EQ(table.Find(Key(1)), wrapped);
}

TEST(PageTableTest, TheFirstPageOfAKeyStaysUntilOneOfANewerGenerationComes) {
  PageTable table;
  const auto first = table.Share(MakePage(1, 2));
  auto second = table.Share(MakePage(1, 2));
  EXPECT_NE(first, second);
  EXPECT_EQ(table.Find(Key(1)), first);
  const auto older = table.Share(MakePage(1, 1));
  EXPECT_EQ(table.Find(Key(1), 2), first);
  EXPECT_EQ(table.Find(Key(1), 1), nullptr);
  second.reset();
  EXPECT_EQ(table.Find(Key(1)), first) << "the end of a page that is not found hides no other";
  const auto newer = table.Share(MakePage(1, 3));
  EXPECT_EQ(table.Find(Key(1), 3), newer);
  EXPECT_EQ(table.Find(Key(1), 2), nullptr);
}

TEST(PageTableTest, TheEndOfAnOldPageHidesNoNewerOne) {
  PageTable table;
  auto old = table.Share(MakePage(1, 1));
  const auto fresh = table.Share(MakePage(1, 2));
  old.reset();
  EXPECT_EQ(table.Find(Key(1)), fresh);
}

TEST(PageTableTest, PagesOfABlockLiveTogether) {
  PageTable table;
  constexpr size_t kPages = kRunPages + 3;
  std::vector<std::shared_ptr<Page>> pages;
  std::vector<std::weak_ptr<Page>> watched;
  for (size_t i = 0; i < kPages; ++i) watched.push_back(pages.emplace_back(MakePage(i)));
  auto shared = table.ShareAll(std::move(pages));
  ASSERT_EQ(shared.size(), kPages);
  for (size_t i = 0; i < kPages; ++i) EXPECT_EQ(table.Find(Key(i)), shared[i]);
  const auto kept = shared[5];
  shared.clear();
  EXPECT_EQ(table.size(), size_t{kRunPages});
  EXPECT_NE(table.Find(Key(0)), nullptr) << "held with page 5";
  EXPECT_EQ(table.Find(Key(kRunPages)), nullptr) << "of the next block";
  EXPECT_TRUE(watched[kRunPages].expired());
}

TEST(PageTableTest, ARemovedPageMakesRoomForAnotherOfItsKey) {
  PageTable table;
  auto damaged = table.Share(MakePage(1));
  const auto other = table.Wrap(MakePage(1));
  table.Remove(*other);
  EXPECT_EQ(table.Find(Key(1)), damaged) << "another page of the key is not removed";
  table.Remove(*damaged);
  EXPECT_EQ(table.Find(Key(1)), nullptr);
  table.Insert(other);
  EXPECT_EQ(table.Find(Key(1)), other);
  damaged.reset();
  EXPECT_EQ(table.Find(Key(1)), other);
  EXPECT_THAT(table.Keys(), testing::ElementsAre(Key(1)));
}

TEST(PageTableTest, PagesOutliveTheTable) {
  std::shared_ptr<const Page> page;
  {
    PageTable table;
    page = table.Share(MakePage(1));
  }
  EXPECT_EQ(page->key, Key(1));
}

// Threads find, share and drop pages of a few keys. A found page is one of its key that lives.
TEST(PageTableTest, ThreadsShareIt) {
  PageTable table;
  std::atomic<int> found{0};
  std::vector<std::thread> threads;
  for (size_t thread = 0; thread < 4; ++thread) {
    threads.emplace_back([&, thread] {
      for (size_t i = 0; i < 5000; ++i) {
        const size_t key = (i * 7 + thread) % 5;
        const auto shared = table.Share(MakePage(key, 1 + i % 3));
        const auto page = table.Find(Key((key + i) % 5));
        if (page == nullptr) continue;
        ++found;
        EXPECT_EQ(page->key, Key((key + i) % 5));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_GT(found, 0);
  EXPECT_EQ(table.size(), 0u);
}

}  // namespace
}  // namespace crumb::client
