// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "storage/host/slab_owners.h"

#include <memory>
#include <optional>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/common/fake_clock.h"

namespace crumb::storage {
namespace {

using Phase = SlabOwners::Slab::Phase;
using testing::ElementsAre;
using testing::IsEmpty;

constexpr uint64_t kSlab = uint64_t{1} << 20;
constexpr uint64_t kSlabs = 4;
constexpr Duration kLetGo = std::chrono::seconds(10);

HostOptions Options() {
  HostOptions options;
  options.bytes_max = ByteSize{kSlabs * kSlab};
  options.slab_bytes = ByteSize{kSlab};
  options.let_go_timeout = kLetGo;
  options.revoked_slabs_max = 3;
  options.revoked_slabs_per_tenant = 2;
  return options;
}

class SlabOwnersTest : public testing::Test {
 protected:
  TimePoint now() const { return clock_.Now(); }
  Phase PhaseOf(uint32_t slab) const { return owners_[slab].phase; }
  // Takes a slot as large as a slab in each slab of the partition.
  std::vector<Slot> FillAll(uint32_t partition) {
    std::vector<Slot> slots;
    while (const auto slot = owners_.Allocate(kSlab, partition)) slots.push_back(*slot);
    return slots;
  }
  // Closes a slab of another partition for this one and empties it.
  uint32_t TakeAway(uint32_t partition, std::vector<Slot>& slots) {
    EXPECT_TRUE(owners_.CloseOneFor(owners_.CountParts(partition), now()));
    const std::vector<uint32_t> closing = owners_.Closing(now());
    EXPECT_EQ(closing.size(), 1u);
    std::erase_if(slots, [&](const Slot& slot) {
      if (slot.region == closing[0]) owners_.Free(slot);
      return slot.region == closing[0];
    });
    EXPECT_TRUE(owners_.GiveUp(closing[0], now()));
    return closing[0];
  }
  StoreStats Stats() const {
    StoreStats stats;
    owners_.AddStats(stats);
    return stats;
  }

  FakeClock clock_;
  const HostOptions options_ = Options();
  const std::unique_ptr<SlabMemory> memory_ = SlabMemory::Open(options_).value();
  SlotAllocator slots_{{.granule_bytes = 512, .page_bytes = 4096}};
  InheritedSlabs inherited_;
  SlabOwners owners_{*memory_, options_, slots_, inherited_, clock_.Now()};
};

TEST_F(SlabOwnersTest, EachTenantHasOnePartition) {
  EXPECT_EQ(owners_.PartitionOf(""), 0u);
  EXPECT_EQ(owners_.PartitionOf("ann"), std::nullopt);
  EXPECT_EQ(owners_.AddPartition("ann", now()), 1u);
  EXPECT_EQ(owners_.AddPartition("bob", now()), 2u);
  EXPECT_EQ(owners_.PartitionOf("ann"), 1u);
  EXPECT_EQ(owners_.PartitionOf("bob"), 2u);
  EXPECT_EQ(owners_.TenantOf(2), "bob");
  EXPECT_EQ(owners_.TenantOf(0), "");
}

// kOwned, kGone, kRenewing, kOwned: a slab that nothing was written to needs no fresh file.
TEST_F(SlabOwnersTest, ASlabWithoutPagesGoesOverAtOnce) {
  const uint32_t ann = owners_.AddPartition("ann", now());
  EXPECT_FALSE(owners_.Allocate(kSlab, ann).has_value());
  ASSERT_TRUE(owners_.MayTakeIdle(owners_.CountParts(ann)));
  const auto idle = owners_.GiveUpIdle(ann, now());
  ASSERT_TRUE(idle.has_value());
  EXPECT_EQ(PhaseOf(*idle), Phase::kGone);
  EXPECT_EQ(Stats().slabs_gone, 1u);
  EXPECT_EQ(Stats().host.capacity_bytes, kSlab);  // the slab that is in no partition
  const std::vector<uint32_t> tried = {*idle};
  EXPECT_EQ(owners_.TakeUnused(tried, now()), std::nullopt);
  ASSERT_EQ(owners_.TakeUnused({}, now()), idle);
  EXPECT_EQ(PhaseOf(*idle), Phase::kRenewing);
  EXPECT_EQ(owners_.TakeUnused({}, now()), std::nullopt);  // one thread has it
  EXPECT_FALSE(owners_[*idle].written);
  owners_.Give(*idle, ann, now());
  EXPECT_EQ(PhaseOf(*idle), Phase::kOwned);
  const auto slot = owners_.Allocate(kSlab, ann);
  ASSERT_TRUE(slot.has_value());
  EXPECT_EQ(slot->region, *idle);
  EXPECT_TRUE(owners_[*idle].written);
  EXPECT_EQ(Stats().slab_moves, 1u);
  EXPECT_EQ(Stats().slabs_owned, kSlabs);
}

// kOwned, kClosing, kGone: a slab with pages is closed, and goes when its last page has left.
TEST_F(SlabOwnersTest, AFullSlabClosesAndGoesWithItsLastPage) {
  std::vector<Slot> slots = FillAll(0);
  ASSERT_EQ(slots.size(), kSlabs);
  const uint32_t ann = owners_.AddPartition("ann", now());
  EXPECT_EQ(owners_.GiveUpIdle(ann, now()), std::nullopt);
  ASSERT_TRUE(owners_.CloseOneFor(owners_.CountParts(ann), now()));
  const std::vector<uint32_t> closing = owners_.Closing(now());
  ASSERT_EQ(closing.size(), 1u);
  EXPECT_EQ(PhaseOf(closing[0]), Phase::kClosing);
  EXPECT_EQ(Stats().slabs_closing, 1u);
  EXPECT_FALSE(owners_.CloseOneFor(owners_.CountParts(ann), now()));  // one at a time

  EXPECT_FALSE(owners_.GiveUp(closing[0], now()));
  EXPECT_THAT(owners_.Closing(now()), IsEmpty());  // it is looked at again later
  clock_.Advance(std::chrono::milliseconds(100));
  EXPECT_THAT(owners_.Closing(now()), ElementsAre(closing[0]));
  for (const Slot& slot : slots) {
    if (slot.region == closing[0]) owners_.Free(slot);
  }
  EXPECT_FALSE(owners_.Allocate(kSlab, 0).has_value());  // a closing slab takes no pages
  EXPECT_TRUE(owners_.GiveUp(closing[0], now()));
  EXPECT_EQ(PhaseOf(closing[0]), Phase::kGone);
}

TEST_F(SlabOwnersTest, ATenantThatKeepsItsSlabsTakesNoOthers) {
  std::vector<Slot> slots = FillAll(0);
  const uint32_t ann = owners_.AddPartition("ann", now());
  EXPECT_FALSE(SlabOwners::KeepsItsPart(owners_.CountParts(0)));
  TakeAway(ann, slots);
  const SlabOwners::Parts parts = owners_.CountParts(0);
  EXPECT_EQ(parts.own(), kSlabs - 1);
  EXPECT_EQ(parts.kept, 1u);
  EXPECT_EQ(parts.part, kSlabs);  // no other tenant has one yet
  EXPECT_TRUE(SlabOwners::KeepsItsPart(parts));
  // Processes may let the first slab go yet: no second one is taken meanwhile.
  EXPECT_FALSE(owners_.CloseOneFor(owners_.CountParts(ann), now()));
  clock_.Advance(kLetGo);
  EXPECT_TRUE(owners_.CloseOneFor(owners_.CountParts(ann), now()));
}

// kGone and kRenewing alternate until the slab has a fresh file.
TEST_F(SlabOwnersTest, ASlabThatProcessesKeepIsRevokedInTime) {
  std::vector<Slot> slots = FillAll(0);
  const uint32_t ann = owners_.AddPartition("ann", now());
  const uint32_t slab = TakeAway(ann, slots);
  ASSERT_EQ(owners_.TakeUnused({}, now()), slab);
  EXPECT_FALSE(owners_.MayRevoke(slab, now()));
  owners_.EndDrop(slab, SlabMemory::Drop::kHeld, /*revoked=*/false, 0, now());
  owners_.EndRenewal(slab, /*fresh=*/false, now());
  EXPECT_EQ(PhaseOf(slab), Phase::kGone);
  EXPECT_FALSE(owners_[slab].dropped);
  EXPECT_EQ(Stats().slab_renewals_failed, 0u);  // it was not for want of memory

  clock_.Advance(kLetGo);
  ASSERT_EQ(owners_.TakeUnused({}, now()), slab);
  EXPECT_TRUE(owners_.MayRevoke(slab, now()));
  owners_.EndDrop(slab, SlabMemory::Drop::kHeld, /*revoked=*/true, 0, now());
  EXPECT_TRUE(owners_[slab].dropped);
  EXPECT_EQ(owners_.revoked_sum(), 1u);
  EXPECT_EQ(owners_.revoked().at(""), 1u);
  owners_.EndRenewal(slab, /*fresh=*/true, now());
  EXPECT_EQ(PhaseOf(slab), Phase::kRenewing);
  EXPECT_FALSE(owners_[slab].written);
  const uint32_t given = owners_[slab].given;
  owners_.Give(slab, ann, now());
  EXPECT_EQ(owners_[slab].given, given + 1);
  EXPECT_EQ(PhaseOf(slab), Phase::kOwned);
}

TEST_F(SlabOwnersTest, RevocationsAreBoundedByTenantAndInAll) {
  std::vector<Slot> slots = FillAll(0);
  const uint32_t ann = owners_.AddPartition("ann", now());
  const uint32_t slab = TakeAway(ann, slots);
  clock_.Advance(kLetGo);
  owners_.SetRevoked({{"", 1}});
  EXPECT_TRUE(owners_.MayRevoke(slab, now()));
  owners_.SetRevoked({{"", 2}});
  EXPECT_FALSE(owners_.MayRevoke(slab, now()));
  owners_.SetRevoked({{"ann", 2}, {"bob", 1}});
  EXPECT_EQ(owners_.revoked_sum(), 3u);
  EXPECT_FALSE(owners_.MayRevoke(slab, now()));
}

TEST_F(SlabOwnersTest, APinnedSlabIsLookedAtAgainAfterAWhile) {
  std::vector<Slot> slots = FillAll(0);
  const uint32_t ann = owners_.AddPartition("ann", now());
  const uint32_t slab = TakeAway(ann, slots);
  ASSERT_EQ(owners_.TakeUnused({}, now()), slab);
  owners_.EndDrop(slab, SlabMemory::Drop::kPinned, /*revoked=*/false, 0, now());
  owners_.EndRenewal(slab, /*fresh=*/false, now());
  owners_.NotePinnedCheck();
  EXPECT_EQ(Stats().slab_pinned_checks, 2u);
  EXPECT_EQ(owners_.TakeUnused({}, now()), std::nullopt);
  clock_.Advance(SlabOwners::kPinnedRetry);
  EXPECT_EQ(owners_.TakeUnused({}, now()), slab);
}

TEST_F(SlabOwnersTest, ASlabWithoutMemoryForAFreshFileIsTriedAgain) {
  std::vector<Slot> slots = FillAll(0);
  const uint32_t ann = owners_.AddPartition("ann", now());
  const uint32_t slab = TakeAway(ann, slots);
  ASSERT_EQ(owners_.TakeUnused({}, now()), slab);
  owners_.EndDrop(slab, SlabMemory::Drop::kDropped, /*revoked=*/false, 7, now());
  EXPECT_EQ(owners_[slab].free_before, 7u);
  owners_.EndRenewal(slab, /*fresh=*/false, now());
  EXPECT_EQ(Stats().slab_renewals_failed, 1u);
  EXPECT_EQ(owners_.CountParts(0).kept, 0u);  // no process has its memory
  EXPECT_EQ(owners_.TakeUnused({}, now()), std::nullopt);
  clock_.Advance(std::chrono::seconds(1));
  ASSERT_EQ(owners_.TakeUnused({}, now()), slab);
  owners_.EndRenewal(slab, /*fresh=*/true, now());
  EXPECT_FALSE(owners_[slab].dropped);
}

// More tenants than slabs: the one that was not used for longest goes without, but keeps its only
// slab for a while.
TEST_F(SlabOwnersTest, TheLeastUsedTenantGoesWithout) {
  for (uint32_t partition = 1; partition <= kSlabs; ++partition) {
    owners_.AddPartition(std::to_string(partition), now());
  }
  for (uint32_t partition = 1; partition < kSlabs; ++partition) {
    const auto idle = owners_.GiveUpIdle(partition, now());
    ASSERT_EQ(owners_.TakeUnused({}, now()), idle);
    owners_.Give(*idle, partition, now());
    ASSERT_TRUE(owners_.Allocate(kSlab, partition).has_value());
  }
  ASSERT_EQ(FillAll(0).size(), 1u);
  EXPECT_FALSE(owners_.CloseOneFor(owners_.CountParts(kSlabs), now()));
  clock_.Advance(std::chrono::seconds(10));
  for (const uint32_t partition : {0u, 1u, 3u}) owners_.NoteUse(partition, now());
  ASSERT_TRUE(owners_.CloseOneFor(owners_.CountParts(kSlabs), now()));
  ASSERT_EQ(owners_.Closing(now()).size(), 1u);
  EXPECT_EQ(owners_[owners_.Closing(now())[0]].partition, 2u);
}

TEST_F(SlabOwnersTest, AReserveOfIdleSlabsStays) {
  const uint32_t ann = owners_.AddPartition("ann", now());
  std::vector<uint32_t> taken;
  while (owners_.MayTakeIdle(owners_.CountParts(ann))) {
    const auto idle = owners_.GiveUpIdle(ann, now());
    if (!idle) break;
    ASSERT_EQ(owners_.TakeUnused({}, now()), idle);
    owners_.Give(*idle, ann, now());
    taken.push_back(*idle);
  }
  EXPECT_EQ(taken.size(), kSlabs - kSlabs / 8);
}

}  // namespace
}  // namespace crumb::storage
