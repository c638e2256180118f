// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "storage/device/uniform_slots.h"

#include <set>

#include "gtest/gtest.h"

namespace crumb::storage {
namespace {

constexpr uint32_t kSlotBytes = 1000;
constexpr uint64_t kHandleBytes = 4500;  // four slots, and 500 bytes that are too few for one

std::vector<UniformSlots::State> Fresh(const UniformSlots& slots) {
  return std::vector<UniformSlots::State>(slots.per_handle(), UniformSlots::State::kFresh);
}

std::set<uint64_t> TakeAll(UniformSlots& slots) {
  std::set<uint64_t> taken;
  while (const auto slot = slots.Take()) {
    EXPECT_TRUE(taken.insert(*slot).second) << "slot " << *slot << " was taken twice";
  }
  return taken;
}

TEST(UniformSlotsTest, EverySlotOfEveryHandleIsTakenOnce) {
  UniformSlots slots(kSlotBytes, kHandleBytes, /*recovering=*/false);
  ASSERT_TRUE(slots.AddHandle(2, Fresh(slots)));
  ASSERT_TRUE(slots.AddHandle(0, Fresh(slots)));
  EXPECT_FALSE(slots.AddHandle(2, Fresh(slots)));
  EXPECT_EQ(slots.waste_bytes(), 1000u);
  EXPECT_EQ(TakeAll(slots), (std::set<uint64_t>{0, 1, 2, 3, 8, 9, 10, 11}));
  EXPECT_EQ(slots.free(), 0u);
  EXPECT_FALSE(slots.Has(4)) << "there is no handle 1";
}

TEST(UniformSlotsTest, AFreedSlotIsTakenAgain) {
  UniformSlots slots(kSlotBytes, kHandleBytes, /*recovering=*/false);
  ASSERT_TRUE(slots.AddHandle(0, Fresh(slots)));
  TakeAll(slots);
  slots.Free(slots.At(2));
  EXPECT_FALSE(slots.Taken(2));
  EXPECT_EQ(slots.used_bytes(), 3u * kSlotBytes);
  EXPECT_EQ(slots.Take(), 2u);
  EXPECT_EQ(slots.Take(), std::nullopt);
}

TEST(UniformSlotsTest, ASlotKnowsItsPlace) {
  const UniformSlots slots(kSlotBytes, kHandleBytes, /*recovering=*/false);
  const Slot slot = slots.At(9);
  EXPECT_EQ(slot.region, 2u);
  EXPECT_EQ(slot.offset, kSlotBytes);
  EXPECT_EQ(slot.bytes, kSlotBytes);
  EXPECT_EQ(slots.NumberOf(slot), 9u);
}

TEST(UniformSlotsTest, RecoveryClaimsSlotsAndThenFreesTheOthers) {
  UniformSlots slots(kSlotBytes, kHandleBytes, /*recovering=*/true);
  ASSERT_TRUE(slots.AddHandle(0, Fresh(slots)));
  EXPECT_EQ(slots.Take(), std::nullopt);
  EXPECT_TRUE(slots.TakeAt(1));
  EXPECT_FALSE(slots.TakeAt(1)) << "it is taken";
  EXPECT_FALSE(slots.TakeAt(4)) << "there is no such slot";
  EXPECT_TRUE(slots.TakeAt(3));
  slots.Free(3);
  EXPECT_TRUE(slots.TakeAt(3)) << "a slot that is freed during the recovery is fresh again";
  EXPECT_EQ(slots.unknown(), 2u);
  slots.EndRecovery();
  EXPECT_EQ(slots.unknown(), 0u);
  EXPECT_EQ(TakeAll(slots), (std::set<uint64_t>{0, 2}));
}

}  // namespace
}  // namespace crumb::storage
