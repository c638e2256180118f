// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "storage/tiered_store.h"

#include <sys/mman.h>

#include <thread>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/storage/store_calls.h"

namespace crumb::storage {
namespace {

class TieredStoreTest : public testing::Test {
 protected:
  void Open(const StoreOptions& options) {
    store_.reset();
    auto opened = TieredStore::Open(options, Clock::Real(), {});
    ASSERT_TRUE(opened.ok()) << opened.status();
    store_ = *std::move(opened);
  }
  void CommitPages(uint64_t sequence, uint64_t pages) {
    for (uint64_t i = 0; i < pages; ++i) {
      const auto outcome = Commit(*store_, SamplePage(sequence, i));
      ASSERT_TRUE(outcome.ok()) << outcome.status();
      ASSERT_EQ(*outcome, CommitOutcome::kStored);
    }
  }

  TemporaryFolder folder_;
  std::unique_ptr<TieredStore> store_;
};

TEST_F(TieredStoreTest, CommittedPagesAreHitsAtOnce) {
  Open(SmallStore(""));
  CommitPages(1, 5);
  const AcquireRequest request = RequestOf(1, 8);
  const auto result = Acquire(*store_, request);
  ASSERT_TRUE(result.ok());
  EXPECT_EQ(result->hit_pages, 5u);
  EXPECT_EQ(result->miss_reason, MissReason::kAbsent);
  EXPECT_THAT(result->page_tiers, testing::ElementsAreArray(std::vector<Tier>(5, Tier::kHost)));
  EXPECT_EQ(result->fragments.size(), 5u);
  EXPECT_TRUE(AllRight(*store_, request, *result));
  EXPECT_EQ(store_->Stats().leases, 1u);
  EXPECT_TRUE(store_->Release(result->lease));
  EXPECT_FALSE(store_->Release(result->lease));
  EXPECT_EQ(store_->Stats().leases, 0u);
  EXPECT_EQ(store_->Stats().leased_slots, 0u);
}

TEST_F(TieredStoreTest, DurablePagesSurviveARestart) {
  Open(SmallStore(folder_.path()));
  CommitPages(1, 20);
  const auto durable = Flush(*store_);
  ASSERT_TRUE(durable.ok()) << durable.status();
  EXPECT_EQ(*durable, 20u);
  Open(SmallStore(folder_.path()));
  EXPECT_EQ(store_->Stats().recovered_pages, 20u);
  const AcquireRequest request = RequestOf(1, 20);
  const auto result = Acquire(*store_, request);
  ASSERT_TRUE(result.ok());
  EXPECT_EQ(result->hit_pages, 20u);
  EXPECT_THAT(result->page_tiers, testing::Each(Tier::kSsd));
  EXPECT_TRUE(AllRight(*store_, request, *result));
}

}  // namespace
}  // namespace crumb::storage
