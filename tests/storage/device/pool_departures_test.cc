// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "storage/device/pool_departures.h"

#include "gtest/gtest.h"
#include "storage/policy/policy.h"
#include "tests/storage/sample_fragment.h"

namespace crumb::storage {
namespace {

constexpr TimePoint kNow{};
constexpr uint32_t kSlotBytes = 1 << 20;
constexpr HolderId kAnn = 1;
constexpr HolderId kBob = 2;

// A pool of eight slots, and pages of sequence 1 in them.
class PoolDeparturesTest : public testing::Test {
 protected:
  PoolDeparturesTest() {
    slots_.AddHandle(0, std::vector<UniformSlots::State>(8, UniformSlots::State::kFresh));
  }
  PageHandle Insert(uint64_t number) {
    const auto page = table_.Insert(MetaOf(SamplePage(1, number)), slots_.At(*slots_.Take()),
                                    Below::kAbsent, /*owed=*/false, kNow);
    EXPECT_TRUE(page.ok()) << page.status();
    return *page;
  }
  uint64_t SlotOf(PageHandle page) const { return slots_.NumberOf(table_[page].fragments[0].slot); }

  UniformSlots slots_{kSlotBytes, uint64_t{8} * kSlotBytes, /*recovering=*/false};
  PageTable table_{*MakePolicy("lru", 1000), slots_};
  PoolDepartures departures_{table_, slots_};
};

TEST_F(PoolDeparturesTest, APageThatGoesFreesItsSlot) {
  Insert(0);
  const auto departure = departures_.Begin(kNoPage, kNow);
  ASSERT_TRUE(departure);
  EXPECT_EQ(slots_.free(), 7u) << "the page is still there";
  departures_.End(*departure, PoolDepartures::Departed::kGone, kNow);
  EXPECT_EQ(slots_.free(), 8u);
  EXPECT_EQ(table_.references(), 0u);
  departures_.End(*departure, PoolDepartures::Departed::kGone, kNow);
  EXPECT_EQ(table_.references(), 0u) << "a departure ends once";
}

TEST_F(PoolDeparturesTest, APageThatIsLeasedMeanwhileStays) {
  const PageHandle page = Insert(0);
  const auto departure = departures_.Begin(kNoPage, kNow);
  ASSERT_TRUE(departure);
  table_.Ref(page);
  departures_.End(*departure, PoolDepartures::Departed::kGone, kNow);
  EXPECT_TRUE(table_[page].resident);
  table_.Unref(page);
  EXPECT_EQ(departures_.Begin(kNoPage, kNow)->page, page) << "it may leave later";
}

TEST_F(PoolDeparturesTest, AParentFollowsTheLastOfItsChildren) {
  const PageHandle parent = Insert(0);
  const PageHandle child = Insert(1);
  const auto first = departures_.Begin(kNoPage, kNow);
  ASSERT_TRUE(first);
  EXPECT_EQ(first->page, child);
  const auto second = departures_.Begin(first->page, kNow);
  ASSERT_TRUE(second);
  EXPECT_EQ(second->page, parent);
  EXPECT_FALSE(departures_.Begin(second->page, kNow)) << "there are no more pages";
}

TEST_F(PoolDeparturesTest, ACopyEndsTheDepartureForTheProcessThatMadeIt) {
  const PageHandle page = Insert(0);
  const uint64_t slot = SlotOf(page);
  const auto departure = departures_.Begin(kNoPage, kNow);
  ASSERT_TRUE(departure);
  EXPECT_EQ(departures_.Demote(*departure, kAnn), std::vector<uint64_t>{slot});
  EXPECT_EQ(departures_.demoting(), 1u);
  EXPECT_EQ(departures_.DemotingAt(kAnn, slot)->key, SampleKey(1, 0));
  EXPECT_FALSE(departures_.DemotingAt(kBob, slot));
  EXPECT_FALSE(departures_.Demoted(kBob, slot, kNow));
  EXPECT_TRUE(departures_.Demoted(kAnn, slot, kNow));
  EXPECT_EQ(slots_.free(), 8u);
  EXPECT_EQ(departures_.demoting(), 0u);
  EXPECT_FALSE(departures_.ForgetDemotion(*departure)) << "it has ended";
  EXPECT_TRUE(departures_.Demote(*departure, kAnn).empty());
}

TEST_F(PoolDeparturesTest, CopiesOfAProcessThatEndsAreDropped) {
  Insert(0);
  const PageHandle other = Insert(1);
  const auto child = departures_.Begin(kNoPage, kNow);
  const auto parent = departures_.Begin(child->page, kNow);
  ASSERT_TRUE(parent);
  departures_.Demote(*child, kBob);
  departures_.Demote(*parent, kAnn);
  EXPECT_EQ(departures_.DropDemotions(kAnn, kNow), 1u);
  EXPECT_EQ(departures_.demoting(), 1u);
  EXPECT_TRUE(table_[other].resident) << "it is the other process that copies it";
  EXPECT_EQ(slots_.free(), 7u);
}

}  // namespace
}  // namespace crumb::storage
