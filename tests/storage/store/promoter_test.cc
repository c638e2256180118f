// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
// Deletes beside many reads of the SSD.
#include "storage/store/promoter.h"

#include <future>
#include <vector>

#include "gtest/gtest.h"
#include "storage/store/open_tiered_store.h"
#include "tests/common/cpu_seconds.h"
#include "tests/common/eventually.h"
#include "tests/storage/fault_tier.h"
#include "tests/storage/memory_tier.h"
#include "tests/storage/store_calls.h"

namespace crumb::storage {
namespace {

using Fault = FaultTier::Fault;

class PromoterTest : public testing::Test {
 protected:
  static constexpr uint64_t kPages = 12'000;

  PromoterTest() {
    StoreOptions options = SmallStore("below");
    options.ssd.io_threads = 1;
    options.ssd.read_queue_pages_max = 16'384;
    store_ = OpenTieredStore(
                 options, Clock::Real(), {},
                 [&](FragmentTierEvents events) -> absl::StatusOr<std::unique_ptr<FragmentTier>> {
                   auto below = std::make_unique<FaultTier>(
                       std::make_unique<MemoryTier>(2 * kPages, Clock::Real(), std::move(events)));
                   below_ = below.get();
                   return below;
                 })
                 .value();
    for (uint64_t i = 0; i < kPages; ++i) StoreBelow(i);
  }
  ~PromoterTest() override { below_->Set(Fault::kNone); }

  static SampleFragment SmallPage(uint64_t number) {
    SampleFragment page = SamplePage(1, number);
    page.range = {{0, 1}, {0, 1}};
    page.tile_bytes = 64;
    return page;
  }
  void StoreBelow(uint64_t number) {
    const SampleFragment page = SmallPage(number);
    const std::vector<std::byte> bytes = BytesOf(page);
    const FragmentWrite write{MetaOf(page), bytes};
    ASSERT_TRUE(below_->inner().Put(std::span(&write, 1)).front().ok());
  }
  // Reads all pages from below, by one call, and none of the reads ends.
  std::future<AcquireResult> StartReads() {
    below_->Set(Fault::kGetBlocks);
    AcquireRequest request = RequestOf(1, kPages);
    request.range = SmallPage(0).range;
    auto answer = std::make_shared<std::promise<AcquireResult>>();
    store_->Acquire(std::move(request), [answer](absl::StatusOr<AcquireResult> result) {
      answer->set_value(*std::move(result));
    });
    EXPECT_TRUE(Eventually([&] { return below_->gets() > 0; }));
    return answer->get_future();
  }

  FaultTier* below_ = nullptr;
  std::unique_ptr<TieredStore> store_;
};

// A Delete that waits for reads of its pages holds the lock that the reads of all tenants need, and
// looked at every read under way each time that one ended.
TEST_F(PromoterTest, ADeleteDoesNotLookAtAllReadsEachTimeOneEnds) {
  std::future<AcquireResult> reads = StartReads();
  std::vector<PageKey> keys;  // only the last one is being read
  for (uint64_t i = 0; i < 4'096; ++i) keys.push_back(SampleKey(2, i));
  keys.push_back(SampleKey(1, kPages - 1));
  std::future<double> deleted = std::async(std::launch::async, [&] {
    const double before = ThreadCpuSeconds();
    EXPECT_TRUE(store_->Delete(SampleKeyspace(0), keys).ok());
    return ThreadCpuSeconds() - before;
  });
  EXPECT_EQ(deleted.wait_for(std::chrono::milliseconds(200)), std::future_status::timeout)
      << "the page is being read";
  below_->Set(Fault::kNone);
  EXPECT_LT(deleted.get(), 0.2) << "seconds of the Delete's thread";
  const AcquireResult result = reads.get();
  EXPECT_GE(result.hit_pages, kPages - 1);
  EXPECT_TRUE(below_->Find(SampleKeyspace(0), SampleKey(1, kPages - 1)).empty());
  EXPECT_EQ(store_->Lookup(RequestOf(1, kPages)).hit_pages, 0u) << "of another range";
}

// Reads that begin while a page is being deleted find it gone, and do not hold the Delete up.
TEST_F(PromoterTest, ADeleteWaitsForTheReadsThatItFoundAndForNoOthers) {
  std::future<AcquireResult> reads = StartReads();
  const std::vector<PageKey> keys = {SampleKey(1, 0), SampleKey(1, 1), SampleKey(1, 2)};
  std::future<bool> deleted =
      std::async(std::launch::async, [&] { return store_->Delete(SampleKeyspace(0), keys).ok(); });
  EXPECT_EQ(deleted.wait_for(std::chrono::milliseconds(100)), std::future_status::timeout);
  AcquireRequest again = RequestOf(1, 3);
  again.range = SmallPage(0).range;
  EXPECT_EQ(Acquire(*store_, again)->hit_pages, 0u) << "it is being deleted";
  below_->Set(Fault::kNone);
  EXPECT_TRUE(deleted.get());
  reads.get();
  EXPECT_EQ(Acquire(*store_, again)->hit_pages, 0u);
}

}  // namespace
}  // namespace crumb::storage
