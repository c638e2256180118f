// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
// With store.ssd.admission at second_hit, a page is admitted with the response that reads it.
#include <memory>
#include <utility>

#include "gtest/gtest.h"
#include "storage/store/open_tiered_store.h"
#include "tests/storage/device/device_tier_fixture.h"
#include "tests/storage/fault_tier.h"
#include "tests/storage/memory_tier.h"
#include "tests/storage/store_calls.h"

namespace crumb::storage {
namespace {

class AdmissionTest : public testing::Test {
 protected:
  AdmissionTest() {
    StoreOptions options = SmallStore("below");
    options.ssd.admission = "second_hit";
    auto opened = OpenTieredStore(
        options, Clock::Real(), {},
        [&](FragmentTierEvents events) -> absl::StatusOr<std::unique_ptr<FragmentTier>> {
          auto below = std::make_unique<FaultTier>(
              std::make_unique<MemoryTier>(100, Clock::Real(), std::move(events)));
          below_ = below.get();
          return below;
        });
    EXPECT_TRUE(opened.ok()) << opened.status();
    store_ = *std::move(opened);
    below_->BlockTouches(true);  // no recency is noted after responses
  }
  ~AdmissionTest() override { below_->BlockTouches(false); }

  // A pool that holds the first page of the sequence.
  DevicePoolNumber PoolWith(uint64_t sequence) {
    DeviceTier& tier = *store_->devices();
    SlotMarks marks = SlotMarks::Map(CreateRoster().value().get()).value();
    const DevicePoolNumber pool =
        tier.slots()
            .AddPool(kSlotBytes, kSlotBytes, /*recovering=*/false, std::move(marks))
            .value();
    EXPECT_TRUE(tier.slots().AddHandle(pool, 0));
    const std::vector<uint64_t> slots = tier.slots().Reserve(pool, kAnn, 1);
    EXPECT_EQ(slots.size(), 1u);
    EXPECT_TRUE(
        tier.slots().Commit(pool, kAnn, slots[0], HeaderOf(SamplePage(sequence, 0)), 1).ok());
    EXPECT_EQ(tier.slots().Release(pool, kAnn, slots), 0u);
    return pool;
  }
  void Read(const AcquireRequest& request, Tier tier) {
    const AcquireResult result = Acquire(*store_, request).value();
    EXPECT_EQ(result.page_tiers, std::vector{tier});
    store_->Release(result.lease);
  }
  void ExpectFlushed(uint64_t durable, uint64_t unread) {
    const FlushReport report = FlushPages(*store_);
    EXPECT_TRUE(report.ToStatus().ok()) << report.ToStatus();
    EXPECT_EQ(report.durable_pages, durable);
    EXPECT_EQ(report.unread_pages, unread);
  }

  FaultTier* below_ = nullptr;
  std::unique_ptr<TieredStore> store_;
};

TEST_F(AdmissionTest, APageReadInHostMemoryIsAdmitted) {
  for (uint64_t i = 0; i < 3; ++i) ASSERT_TRUE(Commit(*store_, SamplePage(i, 0)).ok());
  ExpectFlushed(0, 3);
  Read(RequestOf(1, 1), Tier::kHost);
  ExpectFlushed(1, 2);
}

TEST_F(AdmissionTest, APageReadOnADeviceIsAdmittedWhereItIsInHostMemoryToo) {
  for (uint64_t i = 0; i < 3; ++i) ASSERT_TRUE(Commit(*store_, SamplePage(i, 0)).ok());
  const DevicePoolNumber pool = PoolWith(1);
  ExpectFlushed(0, 3);
  Read(Request(1, 1, {pool}), Tier::kDevice);
  ExpectFlushed(1, 2);
}

}  // namespace
}  // namespace crumb::storage
