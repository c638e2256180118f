// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
// One tenant fills the queues between host memory and the tier below; another one is served.
#include <algorithm>
#include <chrono>
#include <future>
#include <memory>
#include <optional>
#include <string>
#include <thread>
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
    auto response = std::make_shared<std::promise<AcquireResult>>();
    store_->Acquire(std::move(request), [response](absl::StatusOr<AcquireResult> result) {
      response->set_value(*std::move(result));
    });
    return response->get_future();
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

// Tenant a reads fragments of 2 MiB, and b small ones. Two more tenants occupy the threads until
// all reads are queued; then one thread serves a and b.
TEST_F(TenantQueuesTest, ReadsAreFairInBytes) {
  constexpr uint64_t kLarge = 3;
  constexpr uint64_t kSmall = 40;
  options_.host.bytes_max = ByteSize{uint64_t{256} << 20};
  options_.host.slab_bytes = ByteSize{uint64_t{256} << 20};
  options_.ssd.io_threads = 1;  // and a spare one
  options_.ssd.read_queue_pages_max = 1'000;
  Open();
  const KeyspaceId of_c = SampleKeyspace(2);
  const KeyspaceId of_d = SampleKeyspace(3);
  store_->SetOwner(of_c, "c");
  store_->SetOwner(of_d, "d");
  const auto store_below = [&](const KeyspaceId& keyspace, uint64_t sequence, uint32_t tile_bytes) {
    SampleFragment page = SamplePage(sequence, 0);
    page.keyspace = keyspace;
    page.tile_bytes = tile_bytes;
    const std::vector<std::byte> bytes = BytesOf(page);
    const FragmentWrite write{MetaOf(page), bytes};
    ASSERT_TRUE(below_->inner().Put(std::span(&write, 1)).front().ok());
  };
  for (uint64_t i = 0; i < kLarge; ++i) store_below(kOfA, i, 512 << 10);  // 4 tiles each
  for (uint64_t i = 0; i < kSmall; ++i) store_below(kOfB, i, 512);
  store_below(of_c, 0, 512);
  store_below(of_d, 0, 512);

  below_->LimitTo(of_c);
  below_->Set(Fault::kGetBlocks);
  auto read_of_c = StartAcquire(PageOf(of_c, 0));
  ASSERT_TRUE(Eventually([&] { return below_->gets() == 1; }));
  std::promise<void> all_queued;
  below_->AfterNextGet([&] { all_queued.get_future().wait(); });
  auto read_of_d = StartAcquire(PageOf(of_d, 0));
  ASSERT_TRUE(Eventually([&] { return below_->gets() == 2; }));

  std::string order;  // tenants in the order in which their reads end, on one thread
  std::promise<void> all_read;
  const auto read = [&](const KeyspaceId& keyspace, char tenant, uint64_t sequence) {
    store_->Acquire(PageOf(keyspace, sequence),
                    [&, tenant](const absl::StatusOr<AcquireResult>& result) {
                      EXPECT_EQ(result->hit_pages, 1u) << MissReasonName(result->miss_reason);
                      order += tenant;
                      if (order.size() == kLarge + kSmall) all_read.set_value();
                    });
  };
  for (uint64_t i = 0; i < kLarge; ++i) read(kOfA, 'a', i);
  for (uint64_t i = 0; i < kSmall; ++i) read(kOfB, 'b', i);
  all_queued.set_value();
  ASSERT_EQ(all_read.get_future().wait_for(kSoon), std::future_status::ready);
  below_->Set(Fault::kNone);
  read_of_c.wait();
  read_of_d.wait();

  // A fragment of 2 MiB and its header take nine turns of 256 KiB.
  const std::string before_second = order.substr(0, order.find('a', order.find('a') + 1));
  EXPECT_GE(std::count(before_second.begin(), before_second.end(), 'b'), 16) << order;
  EXPECT_LE(std::count(before_second.begin(), before_second.end(), 'b'), 20) << order;
  EXPECT_LT(order.rfind('a'), order.size() - 1) << "the large reads wait for their turns only";
}

// The use of a tenant's pages is noted however much another one reads: otherwise they would be
// evicted as unused.
TEST_F(TenantQueuesTest, UsesOfOneTenantLeaveRoomForThoseOfAnother) {
  constexpr uint64_t kReads = 600;  // more than may wait
  Open();
  CommitPages(kOfA, 0, 1);
  CommitPages(kOfB, 0, 1);
  below_->BlockTouches(true);
  const auto read = [&](const KeyspaceId& keyspace) {
    const absl::StatusOr<AcquireResult> found = Acquire(*store_, PageOf(keyspace, 0));
    ASSERT_EQ(found->hit_pages, 1u);
    store_->Release(found->lease);
  };
  for (uint64_t i = 0; i < kReads; ++i) read(kOfA);
  read(kOfB);
  below_->BlockTouches(false);
  EXPECT_TRUE(Eventually([&] { return below_->touched(kOfB) == 1; }, kSoon));
  EXPECT_LT(below_->touched(kOfA), kReads);
}

class TenantWritesTest : public TenantQueuesTest {
 protected:
  // Starts a Flush of the tenant. Its report comes with the number of pages of a that the tier
  // below had then.
  struct Flushed {
    FlushReport report;
    uint64_t pages_of_a = 0;
  };
  std::future<Flushed> StartFlush(const FlushScope& scope) {
    auto response = std::make_shared<std::promise<Flushed>>();
    store_->Flush(scope, std::nullopt, [this, response](const FlushReport& report) {
      response->set_value({report, below_->KeyspacePages(kOfA)});
    });
    return response->get_future();
  }
  static void ExpectDurable(const FlushReport& report, uint64_t pages) {
    EXPECT_TRUE(report.ToStatus().ok()) << report.ToStatus();
    EXPECT_EQ(report.durable_pages, pages);
  }
};

// While nothing can be written, one tenant fills the queue, and then all of host memory.
TEST_F(TenantWritesTest, NoPageOfAnotherTenantIsLost) {
  Open();
  below_->Set(Fault::kPutBlocks);
  CommitPages(kOfA, 0, 100);
  CommitPages(kOfB, 0, 5);
  CommitPages(kOfA, 100, 300);
  below_->Set(Fault::kNone);
  ExpectDurable(FlushPages(*store_, std::nullopt, "b"), 5);
  const FlushReport of_a = FlushPages(*store_, std::nullopt, "a");
  EXPECT_GT(of_a.lost_pages, 0u);
  EXPECT_EQ(of_a.lost_pages + of_a.durable_pages, 400u);
}

TEST_F(TenantWritesTest, AFlushWaitsForTheQueueOfItsTenantOnly) {
  options_.host.bytes_max = ByteSize{uint64_t{64} << 20};
  Open();
  below_->Set(Fault::kPutBlocks);
  CommitPages(kOfA, 0, 400);
  CommitPages(kOfB, 0, 3);
  std::future<Flushed> of_b = StartFlush("b");
  std::future<Flushed> of_all = StartFlush(std::nullopt);
  below_->Set(Fault::kNone);
  const Flushed b = of_b.get();
  ExpectDurable(b.report, 3);
  EXPECT_LT(b.pages_of_a, 400u) << "it waited for the queue of a";
  const Flushed all = of_all.get();
  ExpectDurable(all.report, 403);
  EXPECT_EQ(all.pages_of_a, 400u);
}

// A Flush writes the pages that the queue had no room for, one batch at a time.
TEST_F(TenantWritesTest, AFlushDoesNotWaitForThatOfAnotherTenant) {
  options_.host.bytes_max = ByteSize{uint64_t{64} << 20};
  options_.ssd.write_queue_pages_max = 8;
  Open();
  below_->Set(Fault::kPutBlocks);
  CommitPages(kOfA, 0, 2'000);
  CommitPages(kOfB, 0, 3);
  std::future<Flushed> of_a = StartFlush("a");
  std::future<Flushed> of_b = StartFlush("b");
  below_->Set(Fault::kNone);
  const Flushed b = of_b.get();
  ExpectDurable(b.report, 3);
  EXPECT_LT(b.pages_of_a, 2'000u) << "it waited for the pages of a";
  ExpectDurable(of_a.get().report, 2'000);
}

// Pages are queued before their keyspace's tenant is known, such as those of a process before.
TEST_F(TenantWritesTest, AFlushWaitsForPagesThatWereQueuedBeforeTheirTenantWasKnown) {
  options_.host.bytes_max = ByteSize{uint64_t{64} << 20};
  Open();
  const KeyspaceId unknown = SampleKeyspace(2);
  below_->Set(Fault::kPutBlocks);
  CommitPages(kOfA, 0, 200);
  CommitPages(unknown, 0, 150);
  store_->SetOwner(unknown, "c");
  std::future<Flushed> of_c = StartFlush("c");
  below_->Set(Fault::kNone);
  ExpectDurable(of_c.get().report, 150);
}

// Calls of Flush that come while one of their tenant is on its way are completed together by the
// next, which covers the pages committed between.
TEST_F(TenantWritesTest, AFlushThatComesDuringAnotherCoversItsOwnPages) {
  Open();
  below_->Set(Fault::kPutBlocks);
  CommitPages(kOfB, 0, 2);
  std::future<Flushed> first = StartFlush("b");
  std::vector<std::future<Flushed>> later;
  for (uint64_t page = 2; page < 5; ++page) {
    CommitPages(kOfB, page, 1);
    later.push_back(StartFlush("b"));
  }
  below_->Set(Fault::kNone);
  EXPECT_TRUE(first.get().report.ToStatus().ok());
  for (std::future<Flushed>& flush : later) EXPECT_TRUE(flush.get().report.ToStatus().ok());
  EXPECT_EQ(below_->KeyspacePages(kOfB), 5u);
}

TEST_F(TenantWritesTest, AStopEndsTheFlushesOfAllTenants) {
  Open();
  below_->Set(Fault::kPutBlocks);
  CommitPages(kOfA, 0, 5);
  std::vector<std::future<Flushed>> flushes;
  for (const char* tenant : {"a", "b", "a", "c"}) flushes.push_back(StartFlush(tenant));
  std::future<void> unblocked = std::async(std::launch::async, [this] {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    below_->Set(Fault::kNone);
  });
  EXPECT_TRUE(store_->Stop(Duration::zero()).ok());
  for (std::future<Flushed>& flush : flushes) {
    const absl::Status status = flush.get().report.ToStatus();
    EXPECT_TRUE(status.ok() || absl::IsUnavailable(status)) << status;
  }
}

}  // namespace
}  // namespace crumb::storage
