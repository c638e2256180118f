// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "common/roster.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "storage/device/device_tier.h"
#include "tests/storage/store_calls.h"

namespace crumb::storage {

inline constexpr uint64_t kSlotBytes = 4 * 4608;
inline constexpr HolderId kAnn = 11;
inline constexpr HolderId kBob = 22;

inline std::shared_ptr<const FragmentHeader> HeaderOf(const SampleFragment& sample) {
  const std::vector<std::byte> bytes = BytesOf(sample);
  return std::make_shared<const FragmentHeader>(
      DecodeFragmentHeader(std::span(bytes).subspan(MetaOf(sample).tiles_bytes)).value());
}

inline AcquireRequest Request(uint64_t sequence, uint64_t pages,
                              std::vector<DevicePoolNumber> pools) {
  AcquireRequest request = RequestOf(sequence, pages);
  request.pools = std::move(pools);
  return request;
}

// Returns false if the pool is in use.
inline bool RemovePool(DeviceTier& tier, DevicePoolNumber pool) {
  std::optional<DeviceSlots::TakenPool> taken = tier.slots().TakePool(pool);
  if (!taken) return false;
  tier.slots().EndPool(*std::move(taken));
  return true;
}

class DeviceTierTest : public testing::Test {
 protected:
  explicit DeviceTierTest(int64_t demotions_max = 256) {
    StoreOptions options = SmallStore("");
    options.device.demotions_max = demotions_max;
    options.device.blank_percent_min = 0;
    auto opened = TieredStore::Open(options, Clock::Real(), {});
    EXPECT_TRUE(opened.ok()) << opened.status();
    store_ = *std::move(opened);
    tier_ = store_->devices();
    tier_->slots().SetDemoters(
        {.choose = [this](DevicePoolNumber) { return demoter_; },
         .request =
             [this](DevicePoolNumber, HolderId, std::span<const DemotionWork> work) {
               requested_.insert(requested_.end(), work.begin(), work.end());
               return accepts_;
             }});
    pool_ = AddPool(8);
  }

  // `recovering`: all processes of the pool had come to the tier before.
  DevicePoolNumber AddPool(uint64_t slots, bool recovering = false) {
    SlotMarks marks = SlotMarks::Map(CreateRoster().value().get()).value();
    if (recovering) marks.SetEpoch(DeletionEpochs().current);
    const auto pool =
        tier_->slots().AddPool(kSlotBytes, slots * kSlotBytes, recovering, std::move(marks));
    EXPECT_TRUE(pool.ok()) << pool.status();
    EXPECT_TRUE(tier_->slots().AddHandle(*pool, 0));
    return *pool;
  }

  // Puts pages into the pool, and lets go of them.
  void Fill(DevicePoolNumber pool, uint64_t sequence, uint64_t first, uint64_t end) {
    for (uint64_t page = first; page < end; ++page) {
      const auto slots = tier_->slots().Reserve(pool, kAnn, 1);
      ASSERT_THAT(slots, testing::SizeIs(1)) << "page " << page;
      ASSERT_TRUE(tier_->slots()
                      .Commit(pool, kAnn, slots[0], HeaderOf(SamplePage(sequence, page)), 1)
                      .ok());
      ASSERT_EQ(tier_->slots().Release(pool, kAnn, slots), 0u);
    }
  }

  DevicePoolStats PoolStats() const { return store_->Stats().pools; }

  std::unique_ptr<TieredStore> store_;
  DeviceTier* tier_ = nullptr;
  DevicePoolNumber pool_ = 0;
  HolderId demoter_ = 0;
  bool accepts_ = true;
  std::vector<DemotionWork> requested_;
};

}  // namespace crumb::storage
