// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
// A chain of pages that is longer than host memory, while the tier below is slow. Only the last
// page of a chain has no children, and as long as it waits to be written it cannot leave.
#include <memory>
#include <vector>

#include "gtest/gtest.h"
#include "storage/store/open_tiered_store.h"
#include "tests/storage/fault_tier.h"
#include "tests/storage/memory_tier.h"
#include "tests/storage/store_calls.h"

namespace crumb::storage {
namespace {

using Fault = FaultTier::Fault;

class LongChainTest : public testing::Test {
 protected:
  LongChainTest() {
    StoreOptions options = SmallStore("below");
    // Room for some 110 pages.
    options.host.bytes_max = ByteSize{uint64_t{2} << 20};
    options.host.slab_bytes = ByteSize{uint64_t{2} << 20};
    store_ = OpenTieredStore(
                 options, Clock::Real(), {},
                 [&](FragmentTierEvents events) -> absl::StatusOr<std::unique_ptr<FragmentTier>> {
                   auto below = std::make_unique<FaultTier>(
                       std::make_unique<MemoryTier>(5'000, Clock::Real(), std::move(events)));
                   below_ = below.get();
                   return below;
                 })
                 .value();
  }
  ~LongChainTest() override { below_->Set(Fault::kNone); }

  // Commits the pages of a sequence that have these numbers.
  void CommitChain(uint64_t sequence, uint64_t first, uint64_t end) {
    for (uint64_t i = first; i < end; ++i) {
      ASSERT_TRUE(Commit(*store_, SamplePage(sequence, i)).ok()) << "page " << i;
    }
  }
  void CommitInParts(uint64_t sequence, uint64_t end) {
    constexpr uint64_t kPart = 20;
    for (uint64_t first = 0; first < end; first += kPart) {
      CommitChain(sequence, first, first + kPart);
      ASSERT_TRUE(Flush(*store_).ok());
    }
  }

  FaultTier* below_ = nullptr;
  std::unique_ptr<TieredStore> store_;
};

TEST_F(LongChainTest, ItsDurablePagesMakeRoomWhileItsLastOnesWaitToBeWritten) {
  constexpr uint64_t kDurable = 100;
  constexpr uint64_t kEnd = kDurable + 24;  // a quarter of host memory may be queued
  CommitInParts(1, kDurable);
  ASSERT_EQ(store_->Stats().host.pages, kDurable);
  below_->Set(Fault::kPutBlocks);
  CommitChain(1, kDurable, kEnd);
  CommitChain(2, 0, 1);  // a page of another sequence
  EXPECT_LT(store_->Stats().host.pages, kEnd) << "memory has room for all";
  below_->Set(Fault::kNone);
  const FlushReport report = FlushPages(*store_);
  EXPECT_TRUE(report.ToStatus().ok()) << report.ToStatus();
  EXPECT_EQ(report.lost_pages, 0u);
  EXPECT_EQ(report.durable_pages, kEnd + 1);
  // The pages that left are read from the tier below: the chain is whole. Memory has no room for
  // all of it at once.
  AcquireRequest end = RequestOf(1, kEnd);
  end.keys.erase(end.keys.begin(), end.keys.begin() + kEnd / 2);
  const absl::StatusOr<AcquireResult> found = Acquire(*store_, end);
  EXPECT_EQ(found->hit_pages, kEnd / 2);
  EXPECT_TRUE(AllRight(*store_, end, *found));
  store_->Release(found->lease);
}

// All pages of the chain are in use: there is no room, and looking for it ends.
TEST_F(LongChainTest, LeasedPagesOfAChainStay) {
  CommitInParts(1, 160);
  AcquireRequest whole = RequestOf(1, 160);
  const LookupResult where = store_->Lookup(whole);
  std::vector<PageKey> in_memory;
  for (size_t i = 0; i < where.page_tiers.size(); ++i) {
    if (where.page_tiers[i] == Tier::kHost) in_memory.push_back(whole.keys[i]);
  }
  ASSERT_GT(in_memory.size(), 40u);
  whole.keys = in_memory;
  const absl::StatusOr<AcquireResult> leased = Acquire(*store_, whole);
  ASSERT_EQ(leased->hit_pages, in_memory.size());
  EXPECT_TRUE(absl::IsResourceExhausted(Commit(*store_, SamplePage(2, 0)).status()));
  EXPECT_TRUE(AllRight(*store_, whole, *leased));
  store_->Release(leased->lease);
  EXPECT_TRUE(Commit(*store_, SamplePage(2, 0)).ok());
}

}  // namespace
}  // namespace crumb::storage
