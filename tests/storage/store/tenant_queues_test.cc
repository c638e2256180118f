// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
// One tenant fills the queues between host memory and the tier below; another one is served.
#include <chrono>
#include <future>
#include <memory>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "storage/store/open_tiered_store.h"
#include "tests/common/eventually.h"
#include "tests/storage/fault_tier.h"
#include "tests/storage/memory_tier.h"
#include "tests/storage/store_calls.h"

namespace crumb::storage {
namespace {

using Fault = FaultTier::Fault;

constexpr int kPercent = 50;
constexpr auto kSoon = std::chrono::seconds(10);

class TenantQueuesTest : public testing::Test {
 protected:
  TenantQueuesTest() {
    options_.host.bytes_max = ByteSize{uint64_t{2} << 20};
    options_.ssd.io_threads = 2;
    options_.ssd.read_queue_pages_max = 8;
  }
  ~TenantQueuesTest() override {
    if (below_ != nullptr) below_->Set(Fault::kNone);
  }

  void Open(int64_t part_max_percent = kPercent) {
    auto opened = OpenTieredStore(
        options_, Clock::Real(), {},
        [&](FragmentTierEvents events) -> absl::StatusOr<std::unique_ptr<FragmentTier>> {
          auto below = std::make_unique<FaultTier>(
              std::make_unique<MemoryTier>(5000, Clock::Real(), std::move(events)));
          below_ = below.get();
          return below;
        },
        {.tenant_part_max_percent = part_max_percent});
    ASSERT_TRUE(opened.ok()) << opened.status();
    store_ = *std::move(opened);
    store_->SetOwner(kOfA, "a");
    store_->SetOwner(kOfB, "b");
  }

  void CommitPages(const KeyspaceId& keyspace, uint64_t first, uint64_t count) {
    for (uint64_t i = first; i < first + count; ++i) {
      SampleFragment sample = SamplePage(i, 0);
      sample.keyspace = keyspace;
      ASSERT_TRUE(Commit(*store_, sample).ok()) << i;
    }
  }
  // Stores the first `count` pages of a keyspace in the tier below alone.
  void StoreBelow(const KeyspaceId& keyspace, uint64_t count) {
    CommitPages(keyspace, 0, count);
    ASSERT_TRUE(Flush(*store_).ok());
    for (uint64_t first = 1'000; first < 1'400; first += 100) {  // they push it out
      CommitPages(keyspace, first, 100);
      ASSERT_TRUE(Flush(*store_).ok());
    }
    ASSERT_EQ(store_->Lookup(PageOf(keyspace, 0)).page_tiers, std::vector{Tier::kSsd});
  }

  static AcquireRequest PageOf(const KeyspaceId& keyspace, uint64_t sequence) {
    AcquireRequest request = RequestOf(sequence, 1);
    request.keyspace = keyspace;
    return request;
  }
  std::future<AcquireResult> StartAcquire(AcquireRequest request) {
    auto answer = std::make_shared<std::promise<AcquireResult>>();
    store_->Acquire(std::move(request), [answer](absl::StatusOr<AcquireResult> result) {
      answer->set_value(*std::move(result));
    });
    return answer->get_future();
  }
  // Reads pages of a from below, each by its own call, and none of the reads ends.
  std::vector<std::future<AcquireResult>> StartReadsOfA(uint64_t count) {
    below_->LimitTo(kOfA);
    below_->Set(Fault::kGetBlocks);
    std::vector<std::future<AcquireResult>> reads;
    for (uint64_t i = 0; i < count; ++i) reads.push_back(StartAcquire(PageOf(kOfA, i)));
    return reads;
  }

  const KeyspaceId kOfA = SampleKeyspace(0);
  const KeyspaceId kOfB = SampleKeyspace(1);
  StoreOptions options_ = SmallStore("below");
  FaultTier* below_ = nullptr;
  std::unique_ptr<TieredStore> store_;
};

TEST_F(TenantQueuesTest, ReadsOfOneTenantLeaveAThreadAndPlacesToAnother) {
  Open();
  StoreBelow(kOfB, 8);
  StoreBelow(kOfA, 40);
  std::vector<std::future<AcquireResult>> reads_of_a = StartReadsOfA(40);
  for (uint64_t i = 0; i < 8; ++i) {
    std::future<AcquireResult> of_b = StartAcquire(PageOf(kOfB, i));
    ASSERT_EQ(of_b.wait_for(kSoon), std::future_status::ready) << "page " << i;
    const AcquireResult found = of_b.get();
    EXPECT_EQ(found.page_tiers, std::vector{Tier::kSsd}) << "page " << i;
    store_->Release(found.lease);
  }
  below_->Set(Fault::kNone);
  uint64_t hits = 0;
  for (std::future<AcquireResult>& read : reads_of_a) {
    const AcquireResult found = read.get();
    hits += found.hit_pages;
    if (found.hit_pages == 0) {
      EXPECT_EQ(found.miss_reason, MissReason::kBusy);
    }
    store_->Release(found.lease);
  }
  EXPECT_GE(hits, 4u) << "its part of the queue";
  EXPECT_LT(hits, 40u);
  EXPECT_EQ(store_->Stats().ssd_reads_refused, 40 - hits);
}

// Without tenants one keyspace may use every thread and every place.
TEST_F(TenantQueuesTest, WithoutTenantsReadsUseTheWholeQueue) {
  Open(/*part_max_percent=*/0);
  StoreBelow(kOfA, 10);
  std::vector<std::future<AcquireResult>> reads = StartReadsOfA(2);
  EXPECT_TRUE(Eventually([&] { return below_->gets() == 2; }));
  for (uint64_t i = 2; i < 10; ++i) reads.push_back(StartAcquire(PageOf(kOfA, i)));
  below_->Set(Fault::kNone);
  for (std::future<AcquireResult>& read : reads) {
    const AcquireResult found = read.get();
    EXPECT_EQ(found.hit_pages, 1u);
    store_->Release(found.lease);
  }
}

}  // namespace
}  // namespace crumb::storage
