// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
// Deletes beside many reads of the SSD.
#include "storage/store/promoter.h"

#include <atomic>
#include <chrono>
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
  static constexpr uint64_t kPages = 6'000;

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
    SampleFragment page = SamplePage(number, 0);
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
  // Reads all pages from below, each by a call of its own, and none of the reads ends.
  void StartReads() {
    below_->Set(Fault::kGetBlocks);
    for (uint64_t i = 0; i < kPages; ++i) {
      AcquireRequest request = RequestOf(i, 1);
      request.range = SmallPage(i).range;
      store_->Acquire(std::move(request), [this](absl::StatusOr<AcquireResult> result) {
        hits_ += result.ok() ? result->hit_pages : 0;
        ++ended_;
      });
    }
    ASSERT_EQ(ended_, 0u);
  }
  bool AllReadsEnd() {
    return Eventually([&] { return ended_ == kPages; });
  }

  std::atomic<uint64_t> hits_{0};
  std::atomic<uint64_t> ended_{0};
  FaultTier* below_ = nullptr;
  std::unique_ptr<TieredStore> store_;
};

// Deletes that wait for reads of their pages hold the lock that the reads of all tenants need, and
// looked at every read under way each time that one ended.
TEST_F(PromoterTest, DeletesDoNotLookAtAllReadsEachTimeOneEnds) {
  constexpr size_t kDeletes = 16;
  StartReads();
  std::vector<PageKey> keys;  // only the last one is being read
  for (uint64_t i = 0; i < 63; ++i) keys.push_back(SampleKey(kPages + i, 0));
  keys.push_back(SampleKey(kPages - 1, 0));
  std::vector<std::future<double>> deletes;
  for (size_t i = 0; i < kDeletes; ++i) {
    deletes.push_back(std::async(std::launch::async, [&] {
      const double before = ThreadCpuSeconds();
      EXPECT_TRUE(store_->Delete(SampleKeyspace(0), keys).ok());
      return ThreadCpuSeconds() - before;
    }));
    EXPECT_EQ(deletes.back().wait_for(std::chrono::milliseconds(100)), std::future_status::timeout)
        << "the page is being read";
  }
  below_->Set(Fault::kNone);
  double seconds = 0;
  for (std::future<double>& deleted : deletes) seconds += deleted.get();
  EXPECT_LT(seconds, 0.1) << "seconds of the Deletes' threads";
  EXPECT_TRUE(AllReadsEnd());
  EXPECT_GE(hits_, kPages - 1);
  EXPECT_TRUE(below_->Find(SampleKeyspace(0), keys.back()).empty());
}

// Reads that begin while a page is being deleted find it gone, and do not hold the Delete up.
TEST_F(PromoterTest, ADeleteWaitsForTheReadsThatItFoundAndForNoOthers) {
  StartReads();
  const std::vector<PageKey> keys = {SampleKey(0, 0), SampleKey(1, 0), SampleKey(2, 0)};
  std::future<bool> deleted =
      std::async(std::launch::async, [&] { return store_->Delete(SampleKeyspace(0), keys).ok(); });
  EXPECT_EQ(deleted.wait_for(std::chrono::milliseconds(200)), std::future_status::timeout);
  AcquireRequest again = RequestOf(2, 1);
  again.range = SmallPage(2).range;
  EXPECT_EQ(Acquire(*store_, again)->hit_pages, 0u) << "it is being deleted";
  below_->Set(Fault::kNone);
  EXPECT_TRUE(deleted.get());
  EXPECT_TRUE(AllReadsEnd());
  EXPECT_EQ(Acquire(*store_, again)->hit_pages, 0u);
}

}  // namespace
}  // namespace crumb::storage
