// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
// Processes come back to the pools of an earlier crumbd and claim their slots.

#include "common/roster.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/storage/device/device_tier_fixture.h"

namespace crumb::storage {
namespace {

using testing::ElementsAre;
using testing::IsEmpty;
using testing::SizeIs;
using testing::UnorderedElementsAre;

TEST_F(DeviceTierTest, ARecoveringPoolGivesOutNothingUntilAllIsKnown) {
  const DevicePoolNumber pool = AddPool(4, true);
  EXPECT_EQ(PoolStats().unknown_slots, 4u);
  EXPECT_THAT(tier_->slots().Reserve(pool, kAnn, 4), IsEmpty());
  const auto header = HeaderOf(SamplePage(1, 0));
  EXPECT_TRUE(tier_->slots().Claim(pool, kAnn, 0, header, 1));
  EXPECT_TRUE(tier_->slots().Claim(pool, kAnn, 0, header, 1));  // claimed twice: one hold
  EXPECT_TRUE(tier_->slots().Claim(pool, kBob, 0, header, 1));  // another reader of it
  EXPECT_EQ(PoolStats().held_slots, 2u);
  EXPECT_TRUE(tier_->slots().Claim(pool, kBob, 1, nullptr, 1));   // blank
  EXPECT_FALSE(tier_->slots().Claim(pool, kAnn, 4, nullptr, 1));  // no such slot
  EXPECT_TRUE(tier_->slots().Claim(pool, kBob, 2, header, 1));    // a second copy stays its own
  EXPECT_EQ(PoolStats().blank_slots, 2u);
  EXPECT_EQ(Acquire(*store_, Request(1, 1, {pool}))->hit_pages, 1u);
  tier_->slots().EndRecovery(pool);
  EXPECT_FALSE(tier_->slots().Claim(pool, kAnn, 2, nullptr, 1));  // too late
  EXPECT_THAT(tier_->slots().Reserve(pool, kAnn, 4), ElementsAre(3));
  EXPECT_EQ(tier_->slots().Release(pool, kBob, std::vector<uint64_t>{0, 1, 2}), 0u);
  EXPECT_EQ(tier_->slots().Release(pool, kAnn, std::vector<uint64_t>{0}), 0u);
}

// A page that was removed while a process holds its slot is no hit of a later crumbd, which
// the process reports the slot to; the slot stays the process's. A page written there since
// is a hit.
TEST_F(DeviceTierTest, ARemovedPageIsNotClaimedAsAHit) {
  const UniqueFd roster = CreateRoster().value();
  const auto add_pool = [&roster](DeviceTier& tier, bool recovering) {
    const auto pool = tier.slots().AddPool(kSlotBytes, 4 * kSlotBytes, recovering,
                                           SlotMarks::Map(roster.get()).value());
    EXPECT_TRUE(tier.slots().AddHandle(*pool, 0));
    return *pool;
  };
  const auto header = [](uint64_t page) { return HeaderOf(SamplePage(1, page)); };
  const DevicePoolNumber first = add_pool(*tier_, false);
  ASSERT_THAT(tier_->slots().Reserve(first, kAnn, 4), ElementsAre(0, 1, 2, 3));
  for (uint64_t slot = 0; slot < 3; ++slot) {
    ASSERT_TRUE(tier_->slots().Commit(first, kAnn, slot, header(slot), 1).ok());
  }
  const KeyspaceId keyspace = header(0)->keyspace;
  EXPECT_THAT(tier_->Remove(keyspace, std::vector<PageKey>{header(1)->key}), SizeIs(1));
  EXPECT_TRUE(tier_->slots().Withdraw(first, 2, header(2)->key));

  // The stores of two later crumbds.
  for (const uint32_t expected : {1u, 2u}) {
    const auto store = TieredStore::Open(SmallStore(""), Clock::Real(), {}).value();
    DeviceTier& tier = *store->devices();
    const DevicePoolNumber pool = add_pool(tier, true);
    for (uint64_t slot = 0; slot < 3; ++slot) {
      EXPECT_TRUE(tier.slots().Claim(pool, kAnn, slot, header(slot), 1));
    }
    EXPECT_EQ(tier.slots().HeldBy(pool, kAnn), 3u);
    EXPECT_EQ(Acquire(*store, Request(1, 3, {pool}))->hit_pages, expected);
    tier.slots().EndRecovery(pool);
    if (expected == 1) {
      EXPECT_TRUE(tier.slots().Commit(pool, kAnn, 1, header(1), 1).ok());
    }
  }
}

// A process may hold a second copy of a page, which the index does not know, and so cannot mark
// when the page is deleted: the copy is a hit of no later crumbd.
TEST_F(DeviceTierTest, ACopyThatIsNotKnownIsNotClaimedAsAHit) {
  const UniqueFd roster = CreateRoster().value();
  const auto add_pool = [&roster](DeviceTier& tier) {
    SlotMarks marks = SlotMarks::Map(roster.get()).value();
    marks.SetEpoch(DeletionEpochs().current);
    const auto pool =
        tier.slots().AddPool(kSlotBytes, 4 * kSlotBytes, /*recovering=*/true, std::move(marks));
    EXPECT_TRUE(tier.slots().AddHandle(*pool, 0));
    return *pool;
  };
  const auto header = HeaderOf(SamplePage(1, 0));
  const DevicePoolNumber first = add_pool(*tier_);
  for (const uint64_t slot : {0, 1})
    ASSERT_TRUE(tier_->slots().Claim(first, kAnn, slot, header, 1));
  tier_->slots().EndRecovery(first);
  ASSERT_THAT(tier_->slots().Reserve(first, kAnn, 2), ElementsAre(2, 3));
  const absl::Status again = tier_->slots().Commit(first, kAnn, 2, header, 1);
  EXPECT_TRUE(absl::IsAlreadyExists(again)) << again;
  ASSERT_TRUE(tier_->slots().Commit(first, kAnn, 3, HeaderOf(SamplePage(1, 1)), 1).ok());
  EXPECT_THAT(tier_->Remove(header->keyspace, std::vector<PageKey>{header->key}), SizeIs(1));

  const auto store = TieredStore::Open(SmallStore(""), Clock::Real(), {}).value();
  DeviceTier& tier = *store->devices();
  const DevicePoolNumber second = add_pool(tier);
  for (const uint64_t slot : {2, 1, 0})
    EXPECT_TRUE(tier.slots().Claim(second, kAnn, slot, header, 1));
  EXPECT_EQ(Acquire(*store, Request(1, 1, {second}))->hit_pages, 0u);
  tier.slots().EndRecovery(second);
  EXPECT_TRUE(tier.slots().Commit(second, kAnn, 1, header, 1).ok()) << "written again since";
  EXPECT_EQ(Acquire(*store, Request(1, 1, {second}))->hit_pages, 1u);
}

// The tiers of one host's crumbds, one after the other, and a pool whose process outlives them.
class EpochsTest : public testing::Test {
 protected:
  EpochsTest() : roster_(CreateRoster().value()) { Start({2, 1}); }

  // The store before is gone, as in a crash.
  void Start(DeletionEpochs epochs) {
    store_.reset();
    store_ = TieredStore::Open(SmallStore(""), Clock::Real(), {}, {.epochs = epochs}).value();
    tier_ = store_->devices();
  }
  void AddPool(bool recovering) {
    pool_ =
        tier_->slots()
            .AddPool(kSlotBytes, 4 * kSlotBytes, recovering, SlotMarks::Map(roster_.get()).value())
            .value();
    ASSERT_TRUE(tier_->slots().AddHandle(pool_, 0));
  }
  // The process has page `slot` in each of two slots.
  void Claim() {
    for (uint64_t slot = 0; slot < 2; ++slot) {
      ASSERT_TRUE(tier_->slots().Claim(pool_, kAnn, slot, Header(slot), 1));
    }
    EXPECT_EQ(tier_->slots().HeldBy(pool_, kAnn), 2u) << "the slots stay the process's in any case";
  }
  static std::shared_ptr<const FragmentHeader> Header(uint64_t page) {
    return HeaderOf(SamplePage(1, page));
  }
  void Delete(uint64_t page) {
    tier_->Remove(Header(page)->keyspace, std::vector<PageKey>{Header(page)->key});
  }
  uint32_t Hits() {
    const auto result = Acquire(*store_, Request(1, 2, {pool_}));
    if (result->lease != 0) store_->Release(result->lease);
    return result->hit_pages;
  }

  const UniqueFd roster_;
  std::unique_ptr<TieredStore> store_;
  DeviceTier* tier_ = nullptr;
  DevicePoolNumber pool_ = 0;
};

class SettledEpochsTest : public EpochsTest {
 protected:
  SettledEpochsTest() {
    AddPool(/*recovering=*/false);
    EXPECT_THAT(tier_->slots().Reserve(pool_, kAnn, 2), ElementsAre(0, 1));
    for (uint64_t slot = 0; slot < 2; ++slot) {
      EXPECT_TRUE(tier_->slots().Commit(pool_, kAnn, slot, Header(slot), 1).ok());
    }
  }
};

TEST_F(SettledEpochsTest, TheNextOneServesThePages) {
  Start({3, 2});
  AddPool(/*recovering=*/true);
  Claim();
  EXPECT_EQ(Hits(), 2u);
}

TEST_F(SettledEpochsTest, APageThatWasDeletedInAnEpochWithoutItsProcessStaysDeleted) {
  Start({3, 2});
  Delete(1);
  Start({4, 3});
  AddPool(/*recovering=*/true);
  Claim();
  EXPECT_EQ(Hits(), 0u);
  // The process goes on using the slots. Neither it nor a later crumbd makes hits of them.
  tier_->slots().EndRecovery(pool_);
  Start({5, 4});
  AddPool(/*recovering=*/true);
  Claim();
  EXPECT_EQ(Hits(), 0u);
}

TEST_F(SettledEpochsTest, APageThatWasDeletedWhileAnotherProcessWasMissingStaysDeleted) {
  Start({3, 2});
  AddPool(/*recovering=*/true);  // the recovery does not end
  Delete(1);
  Start({4, 3});
  AddPool(/*recovering=*/true);
  Claim();
  EXPECT_EQ(Hits(), 0u);
}

TEST_F(SettledEpochsTest, AnEpochThatGoesOnKnowsItsDeletions) {
  Start({3, 2});
  AddPool(/*recovering=*/true);
  Delete(1);
  Claim();
  EXPECT_EQ(Hits(), 1u);
  // The slot of the deleted page is known to later ones, too.
  tier_->slots().EndRecovery(pool_);
  Start({4, 3});
  AddPool(/*recovering=*/true);
  Claim();
  EXPECT_EQ(Hits(), 1u);
}

TEST_F(SettledEpochsTest, APoolThatWasGivenUpMissesLaterDeletions) {
  EXPECT_EQ(tier_->slots().Release(pool_, kAnn, std::vector<uint64_t>{0, 1}), 0u);
  ASSERT_TRUE(RemovePool(*tier_, pool_));
  Delete(1);
  // The tier that gave it up noted the deletion.
  AddPool(/*recovering=*/true);
  Claim();
  EXPECT_EQ(Hits(), 1u);
  tier_->slots().EndHolder(kAnn);
  ASSERT_TRUE(RemovePool(*tier_, pool_));
  Delete(0);
  Start({3, 2});
  AddPool(/*recovering=*/true);
  Claim();
  EXPECT_EQ(Hits(), 0u);
}

// A process may come back after a page that it holds was deleted here.
class TakenOverEpochsTest : public SettledEpochsTest {
 protected:
  TakenOverEpochsTest() {
    EXPECT_TRUE(store_->Stop(Duration::zero()).ok());
    StoreStart start;
    start.epochs = {2, 1};
    start.handed_over = std::make_unique<HandedOverMemory>(store_->HandOver().value());
    store_ = TieredStore::Open(SmallStore(""), Clock::Real(), {}, std::move(start)).value();
    tier_ = store_->devices();
  }
};

// The successor notes the deletion, because the process is not back yet, and its crash loses the
// note.
TEST_F(TakenOverEpochsTest, APageThatWasDeletedBetweenATakeoverAndACrashStaysDeleted) {
  Delete(1);
  Start({3, 2});
  AddPool(/*recovering=*/true);
  Claim();
  EXPECT_EQ(Hits(), 0u);
}

TEST_F(TakenOverEpochsTest, PagesOfAProcessThatCameBackOutliveACrash) {
  AddPool(/*recovering=*/true);
  Claim();
  EXPECT_EQ(Hits(), 2u);
  tier_->slots().EndRecovery(pool_);
  Start({3, 2});
  AddPool(/*recovering=*/true);
  Claim();
  EXPECT_EQ(Hits(), 2u);
}

TEST_F(DeviceTierTest, APageThatIsDeletedBeforeItsClaimIsNoHit) {
  const DevicePoolNumber pool = AddPool(4, true);
  const auto header = [](uint64_t page) { return HeaderOf(SamplePage(1, page)); };
  const KeyspaceId keyspace = header(0)->keyspace;
  EXPECT_THAT(tier_->Remove(keyspace, std::vector<PageKey>{header(1)->key}), IsEmpty());
  for (uint64_t slot = 0; slot < 2; ++slot) {
    EXPECT_TRUE(tier_->slots().Claim(pool, kAnn, slot, header(slot), 1));
  }
  EXPECT_EQ(tier_->slots().HeldBy(pool, kAnn), 2u);
  EXPECT_EQ(Acquire(*store_, Request(1, 2, {pool}))->hit_pages, 1u);
  // Too many deletions to remember: no page comes with a claim, and slots do.
  for (uint64_t sequence = 2; sequence <= 2 + 65'536 / 64; ++sequence) {
    std::vector<PageKey> keys;
    for (uint64_t page = 0; page < 64; ++page) keys.push_back(SamplePage(sequence, page).key);
    tier_->Remove(keyspace, keys);
  }
  EXPECT_TRUE(tier_->slots().Claim(pool, kAnn, 2, header(2), 1));
  EXPECT_EQ(Acquire(*store_, Request(1, 3, {pool}))->hit_pages, 1u);
}

// The process may also come back to a crumbd that took over after the deletion, or to a later one.
TEST_F(DeviceTierTest, ASuccessorKnowsTheDeletionsBefore) {
  const auto header = [](uint64_t page) { return HeaderOf(SamplePage(1, page)); };
  const KeyspaceId keyspace = header(0)->keyspace;
  tier_->Remove(keyspace, std::vector<PageKey>{header(1)->key});
  for (int successor = 0; successor < 2; ++successor) {
    ASSERT_TRUE(store_->Stop(Duration::zero()).ok());
    StoreStart start;
    start.handed_over = std::make_unique<HandedOverMemory>(store_->HandOver().value());
    store_ = TieredStore::Open(SmallStore(""), Clock::Real(), {}, std::move(start)).value();
    tier_ = store_->devices();
  }
  const DevicePoolNumber pool = AddPool(4, true);
  for (uint64_t slot = 0; slot < 2; ++slot) {
    EXPECT_TRUE(tier_->slots().Claim(pool, kAnn, slot, header(slot), 1));
  }
  EXPECT_EQ(Acquire(*store_, Request(1, 2, {pool}))->hit_pages, 1u);
}

// Claims of one slot by readers that know its page or do not, in every order.
class SharedClaimsTest : public DeviceTierTest {
 protected:
  SharedClaimsTest() { pool_ = AddPool(4, true); }

  bool Claim(HolderId holder, const std::shared_ptr<const FragmentHeader>& header) {
    return tier_->slots().Claim(pool_, holder, 0, header, 1);
  }
  size_t Release(HolderId holder) {
    return tier_->slots().Release(pool_, holder, std::vector<uint64_t>{0});
  }
  uint32_t Hits() {
    const auto result = Acquire(*store_, Request(1, 2, {pool_}));
    if (result->lease != 0) store_->Release(result->lease);
    return result->hit_pages;
  }
  // Returns the slots that no process may be using.
  std::vector<uint64_t> FreeSlots() {
    std::vector<uint64_t> slots = tier_->slots().Reserve(pool_, kEve, 4);
    tier_->slots().Release(pool_, kEve, slots);
    return slots;
  }

  static constexpr HolderId kEve = 33;
  const std::shared_ptr<const FragmentHeader> page_ = HeaderOf(SamplePage(1, 0));
  const std::shared_ptr<const FragmentHeader> other_page_ = HeaderOf(SamplePage(1, 1));
};

TEST_F(SharedClaimsTest, ASlotOfTwoHoldersOutlivesTheFirst) {
  const std::vector<std::shared_ptr<const FragmentHeader>> headers = {nullptr, page_};
  for (const auto& ann : headers) {
    for (const auto& bob : headers) {
      for (const bool before : {false, true}) {  // the end of the recovery
        SCOPED_TRACE(testing::Message() << "Ann knows the page: " << (ann != nullptr)
                                        << ", Bob: " << (bob != nullptr) << ", before " << before);
        pool_ = AddPool(4, true);
        EXPECT_TRUE(Claim(kAnn, ann));
        EXPECT_TRUE(Claim(kBob, bob));
        const bool named = ann != nullptr || bob != nullptr;
        EXPECT_EQ(PoolStats().held_slots, 2u);
        EXPECT_EQ(PoolStats().blank_slots, named ? 0u : 1u);
        EXPECT_EQ(Hits(), named ? 1u : 0u);
        const auto release = [&] { EXPECT_EQ(Release(kAnn), 0u); };
        if (before) release();
        tier_->slots().EndRecovery(pool_);
        if (!before) release();
        EXPECT_THAT(FreeSlots(), UnorderedElementsAre(1, 2, 3));
        EXPECT_EQ(tier_->slots().HeldBy(pool_, kBob), 1u);
        tier_->slots().EndHolder(kBob);
        EXPECT_EQ(PoolStats().held_slots, 0u);
        EXPECT_EQ(PoolStats().blank_slots, 0u);
        EXPECT_EQ(tier_->slots().Withdraw(pool_, 0, page_->key), named);
        EXPECT_THAT(FreeSlots(), UnorderedElementsAre(0, 1, 2, 3));
        EXPECT_TRUE(RemovePool(*tier_, pool_));
      }
    }
  }
}

TEST_F(SharedClaimsTest, ALateHeaderNamesTheSlotForAllWhoHoldIt) {
  EXPECT_TRUE(Claim(kAnn, nullptr));
  EXPECT_TRUE(Claim(kBob, nullptr));
  // No process has it alone, to write.
  EXPECT_TRUE(absl::IsInvalidArgument(tier_->slots().Commit(pool_, kAnn, 0, page_, 1)));
  EXPECT_TRUE(Claim(kEve, page_));
  EXPECT_FALSE(Claim(44, other_page_));
  EXPECT_TRUE(Claim(44, page_));
  EXPECT_TRUE(Claim(55, nullptr));
  EXPECT_EQ(PoolStats().held_slots, 5u);
  tier_->slots().EndRecovery(pool_);
  ASSERT_TRUE(store_->Delete(page_->keyspace, std::vector<PageKey>{page_->key}).ok());
  for (const HolderId holder : {kEve, HolderId{44}, kAnn, HolderId{55}}) {
    EXPECT_EQ(Release(holder), 0u);
    EXPECT_EQ(PoolStats().free_slots, 8u + 3u);
  }
  EXPECT_EQ(Release(kBob), 0u);
  EXPECT_EQ(PoolStats().free_slots, 8u + 4u);
}

TEST_F(SharedClaimsTest, AnotherPageInAHeldSlotIsRefused) {
  EXPECT_TRUE(Claim(kAnn, page_));
  EXPECT_FALSE(Claim(kBob, other_page_));
  EXPECT_EQ(tier_->slots().HeldBy(pool_, kBob), 0u);
  EXPECT_EQ(Hits(), 1u);
  // It may hold anything, but the page is known.
  EXPECT_TRUE(Claim(kBob, nullptr));
  EXPECT_EQ(Release(kAnn), 0u);
  tier_->slots().EndRecovery(pool_);
  EXPECT_THAT(FreeSlots(), UnorderedElementsAre(1, 2, 3));
}

// A page that has been deleted, or is another slot's, has no entry: its slot has readers still.
TEST_F(SharedClaimsTest, PagesWithoutAnEntryAreClaimedByAll) {
  EXPECT_TRUE(Claim(kAnn, page_));
  ASSERT_TRUE(store_->Delete(page_->keyspace, std::vector<PageKey>{page_->key}).ok());
  EXPECT_TRUE(Claim(kBob, page_));
  EXPECT_TRUE(tier_->slots().Claim(pool_, kAnn, 1, other_page_, 1));
  EXPECT_TRUE(tier_->slots().Claim(pool_, kAnn, 2, other_page_, 1));
  EXPECT_TRUE(tier_->slots().Claim(pool_, kBob, 2, other_page_, 1));
  tier_->slots().EndRecovery(pool_);
  EXPECT_EQ(tier_->slots().Release(pool_, kAnn, std::vector<uint64_t>{0, 1, 2}), 0u);
  EXPECT_THAT(tier_->slots().Reserve(pool_, kEve, 1), ElementsAre(3));
  EXPECT_EQ(tier_->slots().HeldBy(pool_, kBob), 2u);
}

// A process that is not back may use a slot that all others have released.
TEST_F(SharedClaimsTest, NoSlotIsGivenOutBeforeAllAreBack) {
  EXPECT_TRUE(Claim(kAnn, nullptr));
  EXPECT_TRUE(tier_->slots().Claim(pool_, kAnn, 1, page_, 1));
  EXPECT_EQ(tier_->slots().Release(pool_, kAnn, std::vector<uint64_t>{0, 1}), 0u);
  EXPECT_THAT(tier_->slots().Reserve(pool_, kEve, 4), IsEmpty());
  EXPECT_EQ(Hits(), 1u);  // nothing had to leave
  EXPECT_TRUE(Claim(kBob, nullptr));
  EXPECT_TRUE(tier_->slots().Claim(pool_, kBob, 1, page_, 1));
  tier_->slots().EndRecovery(pool_);
  EXPECT_THAT(tier_->slots().Reserve(pool_, kEve, 4), UnorderedElementsAre(2, 3));
}

}  // namespace
}  // namespace crumb::storage
