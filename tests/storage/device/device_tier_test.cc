// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "storage/device/device_tier.h"

#include <future>
#include <map>
#include <random>
#include <set>
#include <thread>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "storage/store/open_tiered_store.h"
#include "tests/common/cpu_seconds.h"
#include "tests/common/eventually.h"
#include "tests/storage/device/device_tier_fixture.h"
#include "tests/storage/fault_tier.h"
#include "tests/storage/memory_tier.h"

namespace crumb::storage {
namespace {

using testing::Each;
using testing::ElementsAre;
using testing::IsEmpty;
using testing::SizeIs;
using testing::UnorderedElementsAre;

TEST_F(DeviceTierTest, HitsOnTheDeviceComeBeforeHostMemory) {
  Fill(pool_, 1, 0, 3);
  for (uint64_t page = 1; page < 5; ++page) {
    ASSERT_TRUE(Commit(*store_, SamplePage(1, page)).ok());
  }
  const AcquireRequest request = Request(1, 6, {pool_});
  EXPECT_EQ(store_->Lookup(request).hit_pages, 5u);
  const auto result = Acquire(*store_, request);
  ASSERT_TRUE(result.ok());
  EXPECT_EQ(result->hit_pages, 5u);
  EXPECT_EQ(result->miss_reason, MissReason::kAbsent);
  EXPECT_THAT(result->page_tiers,
              ElementsAre(Tier::kDevice, Tier::kDevice, Tier::kDevice, Tier::kHost, Tier::kHost));
  ASSERT_THAT(result->device_fragments, SizeIs(3));
  for (uint32_t page = 0; page < 3; ++page) {
    EXPECT_EQ(result->device_fragments[page].page, page);
    EXPECT_EQ(result->device_fragments[page].header->key, SampleKey(1, page));
  }
  ASSERT_THAT(result->fragments, SizeIs(2));
  EXPECT_EQ(result->fragments[0].page, 3u);
  EXPECT_TRUE(AllRight(*store_, request, *result));
  // A process that cannot reach the pool sees host memory alone, and there page 0 is missing.
  EXPECT_EQ(Acquire(*store_, Request(1, 6, {}))->hit_pages, 0u);
  const auto joined = store_->ReadLease(result->lease, request.range);
  ASSERT_TRUE(joined.has_value());
  EXPECT_EQ(joined->pages, 5u);
  EXPECT_THAT(joined->device_fragments, SizeIs(3));
  EXPECT_EQ(joined->fragments[1].page, 4u);
  EXPECT_EQ(store_->Stats().leases, 1u);
  EXPECT_TRUE(store_->Release(result->lease));
  EXPECT_FALSE(store_->Release(result->lease));
  EXPECT_EQ(store_->Stats().leases, 0u);
  EXPECT_EQ(store_->Stats().leased_slots, 0u);
}

TEST_F(DeviceTierTest, APageBehindAGapIsNoHit) {
  Fill(pool_, 1, 0, 1);
  Fill(pool_, 1, 2, 4);
  const auto result = Acquire(*store_, Request(1, 4, {pool_}));
  ASSERT_TRUE(result.ok());
  EXPECT_EQ(result->hit_pages, 1u);
  EXPECT_EQ(result->miss_reason, MissReason::kAbsent);
  EXPECT_TRUE(store_->Release(result->lease));
  // Nothing keeps the pages behind the gap.
  EXPECT_TRUE(RemovePool(*tier_, pool_));
}

TEST_F(DeviceTierTest, RanksCoverAPageTogether) {
  const DevicePoolNumber other = AddPool(4);
  SampleFragment left = SamplePage(1, 0);
  SampleFragment right = left;
  left.range = {{0, 2}, {0, 1}};
  right.range = {{0, 2}, {1, 2}};
  const auto one = tier_->slots().Reserve(pool_, kAnn, 1);
  const auto two = tier_->slots().Reserve(other, kBob, 1);
  ASSERT_TRUE(tier_->slots().Commit(pool_, kAnn, one[0], HeaderOf(left), 1).ok());
  EXPECT_EQ(Acquire(*store_, Request(1, 1, {pool_, other}))->hit_pages, 0u);
  ASSERT_TRUE(tier_->slots().Commit(other, kBob, two[0], HeaderOf(right), 1).ok());
  EXPECT_EQ(Acquire(*store_, Request(1, 1, {pool_}))->hit_pages, 0u);
  const auto both = Acquire(*store_, Request(1, 1, {pool_, other}));
  ASSERT_EQ(both->hit_pages, 1u);
  EXPECT_THAT(both->device_fragments, SizeIs(2));
  const auto mine = store_->ReadLease(both->lease, right.range);
  ASSERT_TRUE(mine.has_value());
  ASSERT_THAT(mine->device_fragments, SizeIs(1));
  EXPECT_EQ(mine->device_fragments[0].pool, other);
}

TEST_F(DeviceTierTest, TheBestPoolComesFirst) {
  const DevicePoolNumber peer = AddPool(4);
  Fill(pool_, 1, 0, 1);
  Fill(peer, 1, 0, 1);
  EXPECT_EQ(Acquire(*store_, Request(1, 1, {peer, pool_}))->device_fragments[0].pool, peer);
  EXPECT_EQ(Acquire(*store_, Request(1, 1, {pool_, peer}))->device_fragments[0].pool, pool_);
}

TEST_F(DeviceTierTest, OnlyTheHolderCommitsAndReleases) {
  const auto slots = tier_->slots().Reserve(pool_, kAnn, 2);
  const auto header = HeaderOf(SamplePage(1, 0));
  EXPECT_TRUE(absl::IsInvalidArgument(tier_->slots().Commit(pool_, kBob, slots[0], header, 1)));
  EXPECT_TRUE(absl::IsInvalidArgument(tier_->slots().Commit(pool_, kAnn, 1000, header, 1)));
  EXPECT_TRUE(absl::IsInvalidArgument(tier_->slots().Commit(99, kAnn, slots[0], header, 1)));
  EXPECT_EQ(tier_->slots().Release(pool_, kBob, slots), 2u);
  ASSERT_TRUE(tier_->slots().Commit(pool_, kAnn, slots[0], header, 1).ok());
  EXPECT_TRUE(absl::IsInvalidArgument(tier_->slots().Commit(pool_, kAnn, slots[0], header, 1)));
  EXPECT_TRUE(absl::IsAlreadyExists(tier_->slots().Commit(pool_, kAnn, slots[1], header, 1)));
  EXPECT_EQ(tier_->slots().Release(pool_, kAnn, slots), 0u);
  EXPECT_EQ(tier_->slots().Release(pool_, kAnn, slots), 2u);
  EXPECT_EQ(tier_->slots().Demoted(pool_, kAnn, slots), 2u);
  SampleFragment large = SamplePage(1, 1);
  large.tile_bytes = 2 * 4608;
  const auto blank = tier_->slots().Reserve(pool_, kAnn, 1);
  EXPECT_TRUE(
      absl::IsInvalidArgument(tier_->slots().Commit(pool_, kAnn, blank[0], HeaderOf(large), 1)));
}

TEST_F(DeviceTierTest, AnEndedHolderLeavesItsPagesAndNoSlot) {
  const auto slots = tier_->slots().Reserve(pool_, kAnn, 5);
  ASSERT_TRUE(tier_->slots().Commit(pool_, kAnn, slots[0], HeaderOf(SamplePage(1, 0)), 1).ok());
  EXPECT_EQ(PoolStats().held_slots, 5u);
  EXPECT_EQ(PoolStats().blank_slots, 4u);
  EXPECT_FALSE(RemovePool(*tier_, pool_));
  tier_->slots().EndHolder(kAnn);
  EXPECT_EQ(PoolStats().held_slots, 0u);
  EXPECT_EQ(PoolStats().free_slots, 7u);
  EXPECT_EQ(store_->Stats().device.pages, 1u);
  EXPECT_EQ(tier_->slots().HeldBy(pool_, kAnn), 0u);
}

// Evicts from the end of the prefix, and only pages that a tier below has, as long as there are
// any.
TEST_F(DeviceTierTest, PagesWithACopyBelowGoAtOnce) {
  Fill(pool_, 1, 0, 8);
  for (uint64_t page = 0; page < 8; ++page) {
    ASSERT_TRUE(Commit(*store_, SamplePage(1, page)).ok());
  }
  EXPECT_THAT(tier_->slots().Reserve(pool_, kBob, 3), SizeIs(3));
  EXPECT_EQ(PoolStats().dropped_slots, 0u);
  const auto rest = Acquire(*store_, Request(1, 8, {pool_}));
  EXPECT_THAT(rest->page_tiers,
              ElementsAre(Tier::kDevice, Tier::kDevice, Tier::kDevice, Tier::kDevice, Tier::kDevice,
                          Tier::kHost, Tier::kHost, Tier::kHost));
}

TEST_F(DeviceTierTest, PagesWithoutACopyAreCopiedFirst) {
  Fill(pool_, 1, 0, 8);
  demoter_ = kBob;
  EXPECT_THAT(tier_->slots().Reserve(pool_, kAnn, 2), IsEmpty());  // not yet
  ASSERT_THAT(requested_, SizeIs(2));
  EXPECT_EQ(requested_[0].header->key, SampleKey(1, 7));
  EXPECT_EQ(PoolStats().demoting_slots, 2u);
  // Meanwhile the page is a hit.
  const auto hit = Acquire(*store_, Request(1, 8, {pool_}));
  EXPECT_EQ(hit->hit_pages, 8u);
  store_->Release(hit->lease);
  EXPECT_EQ(tier_->slots().Demoted(pool_, kAnn, std::vector<uint64_t>{requested_[0].slot}), 1u);
  ASSERT_TRUE(Commit(*store_, SamplePage(1, 7)).ok());
  ASSERT_TRUE(Commit(*store_, SamplePage(1, 6)).ok());
  EXPECT_EQ(tier_->slots().Demoted(pool_, kBob,
                                   std::vector<uint64_t>{requested_[0].slot, requested_[1].slot}),
            0u);
  EXPECT_THAT(tier_->slots().Reserve(pool_, kAnn, 2),
              UnorderedElementsAre(requested_[0].slot, requested_[1].slot));
  EXPECT_EQ(PoolStats().demoted_slots, 2u);
  EXPECT_EQ(PoolStats().dropped_slots, 0u);
}

TEST_F(DeviceTierTest, ACopyThatFailedIsCountedAsLost) {
  Fill(pool_, 1, 0, 8);
  demoter_ = kBob;
  tier_->slots().Reserve(pool_, kAnn, 1);
  ASSERT_THAT(requested_, SizeIs(1));
  EXPECT_EQ(tier_->slots().Demoted(pool_, kBob, std::vector<uint64_t>{requested_[0].slot}), 0u);
  EXPECT_EQ(PoolStats().demoted_slots, 0u);
  EXPECT_EQ(PoolStats().dropped_slots, 1u);
}

TEST_F(DeviceTierTest, APageLeasedWhileItIsCopiedStays) {
  Fill(pool_, 1, 0, 8);
  demoter_ = kBob;
  tier_->slots().Reserve(pool_, kAnn, 1);
  const auto lease = Acquire(*store_, Request(1, 8, {pool_}));
  ASSERT_TRUE(Commit(*store_, SamplePage(1, 7)).ok());
  EXPECT_EQ(tier_->slots().Demoted(pool_, kBob, std::vector<uint64_t>{requested_[0].slot}), 0u);
  EXPECT_THAT(tier_->slots().Reserve(pool_, kAnn, 8), IsEmpty());
  EXPECT_THAT(Acquire(*store_, Request(1, 8, {pool_}))->page_tiers, Each(Tier::kDevice));
}

TEST_F(DeviceTierTest, WithoutAnybodyToCopyPagesAreDropped) {
  Fill(pool_, 1, 0, 8);
  EXPECT_THAT(tier_->slots().Reserve(pool_, kAnn, 3), SizeIs(3));
  EXPECT_EQ(PoolStats().dropped_slots, 3u);
  demoter_ = kBob;
  accepts_ = false;  // gone between the choice and the request
  EXPECT_THAT(tier_->slots().Reserve(pool_, kAnn, 1), SizeIs(1));
  EXPECT_EQ(PoolStats().dropped_slots, 4u);
  EXPECT_EQ(PoolStats().demoting_slots, 0u);
  EXPECT_EQ(Acquire(*store_, Request(1, 8, {pool_}))->hit_pages, 4u);
}

TEST_F(DeviceTierTest, ADemoterThatEndsLosesWhatItWasToCopy) {
  Fill(pool_, 1, 0, 8);
  demoter_ = kBob;
  EXPECT_THAT(tier_->slots().Reserve(pool_, kAnn, 2), IsEmpty());
  tier_->slots().EndHolder(kBob);
  EXPECT_EQ(PoolStats().dropped_slots, 2u);
  EXPECT_EQ(PoolStats().free_slots, 2u);
  demoter_ = 0;
  EXPECT_THAT(tier_->slots().Reserve(pool_, kAnn, 2), SizeIs(2));
}

class FewDemotionsTest : public DeviceTierTest {
 protected:
  FewDemotionsTest() : DeviceTierTest(2) {}
};

TEST_F(FewDemotionsTest, BeyondTheBoundPagesAreDropped) {
  Fill(pool_, 1, 0, 8);
  demoter_ = kBob;
  EXPECT_THAT(tier_->slots().Reserve(pool_, kAnn, 5), SizeIs(3));
  EXPECT_THAT(requested_, SizeIs(2));
  EXPECT_EQ(PoolStats().dropped_slots, 3u);
}

TEST_F(DeviceTierTest, DeletedAndDroppedPagesKeepTheirSlotsForThoseWhoHoldThem) {
  const auto slots = tier_->slots().Reserve(pool_, kAnn, 2);
  ASSERT_TRUE(tier_->slots().Commit(pool_, kAnn, slots[0], HeaderOf(SamplePage(1, 0)), 1).ok());
  ASSERT_TRUE(tier_->slots().Commit(pool_, kAnn, slots[1], HeaderOf(SamplePage(1, 1)), 1).ok());
  const std::vector<PageKey> keys = {SampleKey(1, 0)};
  EXPECT_EQ(store_->Delete(SamplePage(1, 0).keyspace, keys).value(), 1u);
  EXPECT_EQ(store_->DropKeyspace(SamplePage(1, 0).keyspace, 2).value(), 1u);
  EXPECT_EQ(store_->Stats().device.pages, 0u);
  EXPECT_EQ(PoolStats().free_slots, 6u);
  EXPECT_EQ(tier_->slots().Release(pool_, kAnn, slots), 0u);
  EXPECT_EQ(PoolStats().free_slots, 8u);
  // An older generation is refused, in pools to come as well.
  const DevicePoolNumber later = AddPool(2);
  const auto blank = tier_->slots().Reserve(later, kAnn, 1);
  EXPECT_TRUE(
      absl::IsAborted(tier_->slots().Commit(later, kAnn, blank[0], HeaderOf(SamplePage(1, 0)), 1)));
}

TEST_F(DeviceTierTest, RefusesPoolsOfImpossibleSizes) {
  EXPECT_TRUE(absl::IsInvalidArgument(tier_->slots().AddPool(0, 4096, false).status()));
  EXPECT_TRUE(absl::IsInvalidArgument(tier_->slots().AddPool(100, 4096, false).status()));
  EXPECT_TRUE(absl::IsInvalidArgument(tier_->slots().AddPool(4096, 2048, false).status()));
  EXPECT_TRUE(absl::IsInvalidArgument(
      tier_->slots().AddPool(uint64_t{1} << 32, uint64_t{1} << 40, false).status()));
  EXPECT_TRUE(
      absl::IsInvalidArgument(tier_->slots().AddPool(128, uint64_t{1} << 60, false).status()));
  EXPECT_FALSE(tier_->slots().AddHandle(pool_, 0));
  EXPECT_FALSE(tier_->slots().AddHandle(1234, 0));
}

// The store over a tier below whose reads wait for the test, so that an Acquire refers to pages of
// a pool for as long as the test likes.
class SlowTierBelowTest : public testing::Test {
 protected:
  SlowTierBelowTest() {
    auto opened = OpenTieredStore(
        SmallStore("somewhere"), Clock::Real(), {},
        [this](FragmentTierEvents events) -> absl::StatusOr<std::unique_ptr<FragmentTier>> {
          auto below = std::make_unique<FaultTier>(
              std::make_unique<MemoryTier>(1000, Clock::Real(), std::move(events)));
          below_ = below.get();
          return below;
        });
    EXPECT_TRUE(opened.ok()) << opened.status();
    store_ = *std::move(opened);
    tier_ = store_->devices();
    pool_ = tier_->slots().AddPool(kSlotBytes, 8 * kSlotBytes, false).value();
    EXPECT_TRUE(tier_->slots().AddHandle(pool_, 0));
  }
  ~SlowTierBelowTest() override { below_->Set(FaultTier::Fault::kNone); }

  // Page 0 is in the pool, pages 1 to 4 are below alone. Returns an Acquire that waits for page 1.
  std::future<absl::StatusOr<AcquireResult>> AcquireThatWaits() {
    for (uint64_t page = 1; page < 5; ++page) {
      const SampleFragment sample = SamplePage(1, page);
      const std::vector<std::byte> bytes = BytesOf(sample);
      const FragmentWrite write = {MetaOf(sample), bytes};
      EXPECT_TRUE(below_->Put(std::span(&write, 1)).front().ok());
    }
    const auto slots = tier_->slots().Reserve(pool_, kAnn, 1);
    EXPECT_TRUE(tier_->slots().Commit(pool_, kAnn, slots[0], HeaderOf(SamplePage(1, 0)), 1).ok());
    tier_->slots().EndHolder(kAnn);
    below_->Set(FaultTier::Fault::kGetBlocks);
    AcquireRequest request = RequestOf(1, 5);
    request.pools = {pool_};
    auto promise = std::make_shared<std::promise<absl::StatusOr<AcquireResult>>>();
    store_->Acquire(request, [promise](absl::StatusOr<AcquireResult> result) {
      promise->set_value(std::move(result));
    });
    EXPECT_TRUE(Eventually([&] { return below_->gets() > 0; }));
    return promise->get_future();
  }
  void DeletePageOfThePool() {
    const std::vector<PageKey> keys = {SampleKey(1, 0)};
    EXPECT_EQ(store_->Delete(SamplePage(1, 0).keyspace, keys).value(), 1u);
  }

  FaultTier* below_ = nullptr;
  std::unique_ptr<TieredStore> store_;
  DeviceTier* tier_ = nullptr;
  DevicePoolNumber pool_ = 0;
};

// The page is in no index any more and no lease names it, but the Acquire will.
TEST_F(SlowTierBelowTest, APoolOutlivesTheAcquireThatRefersToItsDeletedPage) {
  auto acquired = AcquireThatWaits();
  DeletePageOfThePool();
  EXPECT_EQ(store_->Stats().device.pages, 0u);
  EXPECT_FALSE(RemovePool(*tier_, pool_));
  EXPECT_EQ(store_->Stats().pools.pools, 1u);
  below_->Set(FaultTier::Fault::kNone);
  const absl::StatusOr<AcquireResult> result = acquired.get();
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->hit_pages, 5u);
  ASSERT_THAT(result->device_fragments, SizeIs(1));
  EXPECT_FALSE(RemovePool(*tier_, pool_));  // leased now
  EXPECT_TRUE(store_->Release(result->lease));
  EXPECT_TRUE(RemovePool(*tier_, pool_));
  EXPECT_EQ(store_->Stats().pools.pools, 0u);
}

// Pages that an Acquire refers to and does not lease are given back to a pool that is there.
TEST_F(SlowTierBelowTest, APoolOutlivesTheAcquireThatLeasesNothing) {
  auto acquired = AcquireThatWaits();
  DeletePageOfThePool();
  EXPECT_FALSE(RemovePool(*tier_, pool_));
  below_->Set(FaultTier::Fault::kGetFails);
  const absl::StatusOr<AcquireResult> result = acquired.get();
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->hit_pages, 1u);
  EXPECT_TRUE(store_->Release(result->lease));
  EXPECT_TRUE(RemovePool(*tier_, pool_));
}

// A page that leaves is referred to until it has been copied, deleted or not.
TEST_F(DeviceTierTest, APoolOutlivesTheCopiesOfItsPages) {
  Fill(pool_, 1, 0, 8);
  demoter_ = kBob;
  EXPECT_THAT(tier_->slots().Reserve(pool_, kAnn, 1), IsEmpty());
  ASSERT_THAT(requested_, SizeIs(1));
  ASSERT_TRUE(store_->DropKeyspace(SamplePage(1, 0).keyspace, 2).ok());
  EXPECT_EQ(store_->Stats().device.pages, 0u);
  EXPECT_FALSE(RemovePool(*tier_, pool_));
  EXPECT_EQ(tier_->slots().Demoted(pool_, kBob, std::vector<uint64_t>{requested_[0].slot}), 0u);
  EXPECT_TRUE(RemovePool(*tier_, pool_));
}

// A page chosen to leave goes to a process that ends before it receives the request; its slot has
// another page by the time that the choice is taken back.
TEST_F(DeviceTierTest, ACopyThatIsTakenBackLateTouchesNoOtherPage) {
  Fill(pool_, 1, 0, 8);
  demoter_ = kBob;
  bool first = true;
  tier_->slots().SetDemoters(
      {.choose = [](DevicePoolNumber) { return kBob; },
       .request =
           [&](DevicePoolNumber, HolderId, std::span<const DemotionWork> work) {
             if (!std::exchange(first, false)) return true;
             tier_->slots().EndDemotions(kBob);  // the page goes, and its handle is free
             const auto slots = tier_->slots().Reserve(pool_, kAnn, 1);
             EXPECT_THAT(slots, ElementsAre(work[0].slot));
             EXPECT_TRUE(
                 tier_->slots().Commit(pool_, kAnn, slots[0], HeaderOf(SamplePage(2, 0)), 1).ok());
             EXPECT_EQ(tier_->slots().Release(pool_, kAnn, slots), 0u);
             // The new page is used last, so the others leave first: all are to be copied.
             EXPECT_THAT(tier_->slots().Reserve(pool_, kAnn, 8), IsEmpty());
             EXPECT_EQ(PoolStats().demoting_slots, 8u);
             return false;
           }});
  tier_->slots().Reserve(pool_, kAnn, 1);
  EXPECT_EQ(PoolStats().demoting_slots, 8u);
  EXPECT_EQ(store_->Stats().device.pages, 8u);
}

// A pool's slots are found without a list of them, in every order of handles.
TEST_F(DeviceTierTest, EverySlotOfEveryHandleIsGivenOutOnce) {
  for (const bool recovering : {false, true}) {
    const DevicePoolNumber pool = AddPool(4, recovering);
    EXPECT_TRUE(tier_->slots().AddHandle(pool, 7));
    EXPECT_TRUE(tier_->slots().AddHandle(pool, 2));
    EXPECT_FALSE(tier_->slots().AddHandle(pool, 7));
    std::vector<uint64_t> expected;
    for (const uint64_t handle : {0, 2, 7}) {
      for (uint64_t slot = 0; slot < 4; ++slot) expected.push_back(4 * handle + slot);
    }
    if (recovering) {
      EXPECT_FALSE(tier_->slots().Claim(pool, kBob, 4, nullptr, 1));  // its handle is not there
      EXPECT_TRUE(tier_->slots().Claim(pool, kBob, 9, nullptr, 1));
      EXPECT_TRUE(tier_->slots().Claim(pool, kBob, 30, nullptr, 1));
      EXPECT_EQ(tier_->slots().Release(pool, kBob, std::vector<uint64_t>{30}), 0u);
      std::erase(expected, 9u);
      tier_->slots().EndRecovery(pool);
    }
    for (int round = 0; round < 3; ++round) {
      const auto slots = tier_->slots().Reserve(pool, kAnn, 20);
      EXPECT_THAT(slots, testing::UnorderedElementsAreArray(expected));
      EXPECT_EQ(tier_->slots().Release(pool, kAnn, slots), 0u);
    }
    tier_->slots().EndHolder(kBob);
    EXPECT_TRUE(RemovePool(*tier_, pool));
  }
}

// An Acquire that names a page names its fragments: a page of very many would cost far more than
// the request's bytes.
TEST_F(DeviceTierTest, APageHasABoundedNumberOfFragments) {
  const DevicePoolNumber pool = AddPool(200);
  const auto bound = static_cast<uint16_t>(StoreOptions().page_fragments_max);
  const auto slots = tier_->slots().Reserve(pool, kAnn, bound + 1u);
  for (uint16_t layer = 0; layer <= bound; ++layer) {
    SampleFragment piece = SamplePage(1, 0);
    const auto next = static_cast<uint16_t>(layer + 1);
    piece.range = {{layer, next}, {0, 1}};
    const absl::Status status = tier_->slots().Commit(pool, kAnn, slots[layer], HeaderOf(piece), 1);
    EXPECT_EQ(absl::IsResourceExhausted(status), layer == bound) << status;
  }
  EXPECT_EQ(PoolStats().blank_slots, 1u);
}

// A tenant may cut its pages into fragments of one tile each, spread over as many pools as a
// request may name. The cost of a look-up grows with the fragments, not with their pairs.
TEST_F(DeviceTierTest, APageOfManyFragmentsInManyPoolsIsFoundInTimeInThem) {
  constexpr int kPools = 32;
  constexpr int kFragments = 64;
  constexpr uint64_t kPages = 16;
  AcquireRequest request = RequestOf(1, kPages);
  request.range = {{0, kFragments}, {0, kPools}};
  for (int pool = 0; pool < kPools; ++pool) {
    request.pools.push_back(AddPool(kPages * kFragments));
    const auto slots = tier_->slots().Reserve(request.pools.back(), kAnn, kPages * kFragments);
    ASSERT_THAT(slots, SizeIs(kPages * kFragments));
    for (size_t i = 0; i < slots.size(); ++i) {
      SampleFragment tile = SamplePage(1, i / kFragments);
      const auto layer = static_cast<uint16_t>(i % kFragments);
      const auto head = static_cast<uint16_t>(pool);
      tile.range = {{layer, static_cast<uint16_t>(layer + 1)},
                    {head, static_cast<uint16_t>(head + 1)}};
      ASSERT_TRUE(
          tier_->slots().Commit(request.pools.back(), kAnn, slots[i], HeaderOf(tile), 1).ok());
    }
  }
  const double before = ThreadCpuSeconds();
  EXPECT_THAT(tier_->Covered(request), Each(true));
  // Some 33,000 fragments; their pairs are 34,000,000, 34 ms at a nanosecond each.
  EXPECT_LT(ThreadCpuSeconds() - before, 0.015);
  // A pool whose tile another one has adds nothing; without that other one a tile is missing.
  std::swap(request.pools[0], request.pools[5]);
  EXPECT_THAT(tier_->Covered(request), Each(true));
  request.pools[3] = request.pools[4];
  EXPECT_THAT(tier_->Covered(request), Each(false));
}

// Fragments on devices and in host memory count together towards the limit of a response.
TEST_F(DeviceTierTest, AResponseNamesABoundedNumberOfFragments) {
  Fill(pool_, 1, 0, 3);
  for (uint64_t page = 3; page < 5; ++page) {
    ASSERT_TRUE(Commit(*store_, SamplePage(1, page)).ok());
  }
  AcquireRequest request = Request(1, 5, {pool_});
  request.fragments_max = 4;  // two are taken by host memory
  const auto cut = Acquire(*store_, request);
  ASSERT_TRUE(cut.ok());
  EXPECT_EQ(cut->hit_pages, 2u);
  EXPECT_EQ(cut->miss_reason, MissReason::kBusy);
  EXPECT_THAT(cut->page_tiers, Each(Tier::kDevice));
  EXPECT_THAT(cut->device_fragments, SizeIs(2));
  EXPECT_THAT(cut->fragments, IsEmpty());
  const auto read = store_->ReadLease(cut->lease, request.range);
  ASSERT_TRUE(read.has_value());
  EXPECT_EQ(read->pages, 2u);
  EXPECT_THAT(read->fragments, IsEmpty());
  EXPECT_TRUE(store_->Release(cut->lease));
  request.fragments_max = 2;
  const auto none = Acquire(*store_, request);
  ASSERT_TRUE(none.ok());
  EXPECT_EQ(none->hit_pages, 0u);
  EXPECT_EQ(none->miss_reason, MissReason::kBusy);
  EXPECT_EQ(none->lease, 0u);
  EXPECT_EQ(store_->Stats().leases, 0u);
  EXPECT_TRUE(RemovePool(*tier_, pool_));  // nothing refers to its pages
}

// A walk over more pages than one hold of the lock sees each of them once.
TEST_F(DeviceTierTest, AWalkInPiecesSeesEveryPageOnce) {
  constexpr uint64_t kPages = 10'000;
  const DevicePoolNumber large = AddPool(kPages);
  Fill(large, 1, 0, kPages);
  std::set<PageKey> seen;
  tier_->ForEachPage(RequestOf(1, 1).keyspace, [&](const PageKey& key) { seen.insert(key); });
  EXPECT_THAT(seen, SizeIs(kPages));
}

TEST_F(DeviceTierTest, ARemovedPoolLeavesItsCounters) {
  Fill(pool_, 1, 0, 5);
  const TierStats before = store_->Stats().device;
  EXPECT_TRUE(RemovePool(*tier_, pool_));
  const TierStats after = store_->Stats().device;
  EXPECT_EQ(after.stored_put_bytes, before.stored_put_bytes);
  EXPECT_EQ(after.evicted.capacity + after.evicted.ancestor, 5u);
  EXPECT_EQ(after.pages, 0u);
  EXPECT_EQ(after.capacity_bytes, 0u);
}

// Random calls of three processes against a model that knows who uses which slot: a slot is never
// given out while a process may read or write it, and in the end none is lost.
TEST_F(DeviceTierTest, NoSlotHasTwoUsers) {
  const uint32_t seed = std::random_device{}();
  SCOPED_TRACE(seed);
  std::mt19937 random(seed);
  tier_->slots().AddHandle(pool_, 1);
  constexpr uint64_t kSlots = 16;
  std::map<HolderId, std::map<uint64_t, bool>> held;  // slot -> whether it is committed
  std::vector<std::pair<LeaseId, std::set<uint64_t>>> leases;
  const auto in_use = [&](uint64_t slot) {
    for (const auto& [holder, slots] : held) {
      if (slots.contains(slot)) return true;
    }
    for (const auto& [lease, slots] : leases) {
      if (slots.contains(slot)) return true;
    }
    return false;
  };
  const auto demote = [&] {
    for (const DemotionWork& work : requested_) {
      if (random() % 2 == 0) {
        for (uint64_t page = 0; page < 12; ++page) {
          if (work.header->key == SampleKey(1, page)) Commit(*store_, SamplePage(1, page)).value();
        }
      }
      EXPECT_EQ(tier_->slots().Demoted(pool_, demoter_, std::vector<uint64_t>{work.slot}), 0u);
    }
    requested_.clear();
  };
  for (int turn = 0; turn < 20'000; ++turn) {
    const HolderId holder = 1 + random() % 3;
    auto& mine = held[holder];
    switch (random() % 7) {
      case 0: {
        const HolderId demoter = random() % 2 == 0 ? 0 : 77;
        if (requested_.empty()) demoter_ = demoter;
        for (const uint64_t slot : tier_->slots().Reserve(pool_, holder, 1 + random() % 4)) {
          ASSERT_FALSE(in_use(slot)) << "turn " << turn << ", slot " << slot;
          ASSERT_LT(slot, kSlots);
          mine[slot] = false;
        }
        break;
      }
      case 1:
      case 2:
        if (mine.empty()) break;
        {
          const auto slot = std::next(mine.begin(), static_cast<int>(random() % mine.size()));
          const absl::Status status = tier_->slots().Commit(
              pool_, holder, slot->first, HeaderOf(SamplePage(1, random() % 12)), 1);
          EXPECT_EQ(absl::IsInvalidArgument(status), slot->second);
          if (status.ok()) slot->second = true;
        }
        break;
      case 3:
        if (mine.empty()) break;
        {
          const uint64_t slot =
              std::next(mine.begin(), static_cast<int>(random() % mine.size()))->first;
          EXPECT_EQ(tier_->slots().Release(pool_, holder, std::vector<uint64_t>{slot}), 0u);
          mine.erase(slot);
        }
        break;
      case 4: {
        const auto result = Acquire(*store_, Request(1, 12, {pool_}));
        ASSERT_TRUE(result.ok());
        std::set<uint64_t> slots;
        for (const DeviceFragmentRef& fragment : result->device_fragments) {
          slots.insert(fragment.slot);
          EXPECT_EQ(fragment.header->key, SampleKey(1, fragment.page));
        }
        if (result->lease != 0) leases.push_back({result->lease, slots});
        break;
      }
      case 5:
        if (leases.empty()) break;
        std::swap(leases[random() % leases.size()], leases.back());
        EXPECT_TRUE(store_->Release(leases.back().first));
        leases.pop_back();
        break;
      case 6:
        demote();
        if (random() % 50 == 0) {
          tier_->slots().EndHolder(holder);
          mine.clear();
        }
        if (random() % 20 == 0) {
          const std::vector<PageKey> keys = {SampleKey(1, random() % 12)};
          ASSERT_TRUE(store_->Delete(SampleKeyspace(0), keys).ok());
        }
        break;
    }
  }
  demote();
  for (const auto& [lease, slots] : leases) EXPECT_TRUE(store_->Release(lease));
  for (const HolderId holder : {1, 2, 3}) tier_->slots().EndHolder(holder);
  EXPECT_EQ(PoolStats().free_slots + store_->Stats().device.pages, kSlots);
  EXPECT_TRUE(RemovePool(*tier_, pool_));
}

}  // namespace
}  // namespace crumb::storage
