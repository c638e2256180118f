// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "storage/index/eviction_order.h"

#include <algorithm>
#include <map>
#include <random>
#include <set>

#include "gtest/gtest.h"
#include "tests/storage/index/page_table_fixture.h"

namespace crumb::storage {
namespace {

using EvictionOrderTest = PageTableTest;

TEST_F(EvictionOrderTest, LeavesGoBeforeTheirAncestorsInWhateverOrderTheyCame) {
  for (const uint64_t number : {2, 0, 3, 1}) ASSERT_TRUE(Insert(SamplePage(1, number)).ok());
  for (const uint64_t number : {3, 2, 1, 0}) {
    const auto victim = table_.order().Victim(kNow, AnyPage);
    ASSERT_TRUE(victim);
    EXPECT_EQ(table_[*victim].key, SampleKey(1, number));
    table_.Remove(*victim, RemovalReason::kCapacity, kNow);
  }
  EXPECT_FALSE(table_.order().Victim(kNow, AnyPage));
  EXPECT_EQ(slots_.used_bytes(), 0u);
}

TEST_F(EvictionOrderTest, AParentThatComesBackIsAParentAgain) {
  for (uint64_t number = 0; number < 3; ++number) ASSERT_TRUE(Insert(SamplePage(1, number)).ok());
  table_.Remove(table_.pages().Find(SampleKeyspace(0), SampleKey(1, 1)), RemovalReason::kDeleted,
                kNow);
  ASSERT_TRUE(Insert(SamplePage(1, 1)).ok());
  const auto victim = table_.order().Victim(kNow, AnyPage);
  ASSERT_TRUE(victim);
  EXPECT_EQ(table_[*victim].key, SampleKey(1, 2));
}

TEST_F(EvictionOrderTest, ARingOfParentsCanStillBeEvicted) {
  for (uint64_t i = 0; i < 3; ++i) {
    SampleFragment sample = SamplePage(1, i);
    sample.parent = SampleKey(1, (i + 1) % 3);
    ASSERT_TRUE(Insert(sample).ok());
  }
  SampleFragment own_parent = SamplePage(2, 0);
  own_parent.parent = own_parent.key;
  ASSERT_TRUE(Insert(own_parent).ok());
  for (int i = 0; i < 4; ++i) {
    const auto victim = table_.order().Victim(kNow, AnyPage);
    ASSERT_TRUE(victim);
    table_.Remove(*victim, RemovalReason::kCapacity, kNow);
  }
}

// A model of a page table's parents, whatever it costs.
class ChainModel {
 public:
  void Insert(const PageKey& key, const PageKey& parent) {
    resident_.insert(key);
    bool ring = parent == PageKey{} || parent == key;
    for (PageKey at = parent; !ring && resident_.contains(at) && links_.contains(at);) {
      at = links_[at];
      ring = at == key;
    }
    if (!ring) links_[key] = parent;
  }
  void Remove(const PageKey& key) {
    resident_.erase(key);
    links_.erase(key);
  }
  bool IsLeaf(const PageKey& key) const {
    return std::none_of(links_.begin(), links_.end(),
                        [&](const auto& link) { return link.second == key; });
  }
  const std::set<PageKey>& resident() const { return resident_; }

 private:
  std::set<PageKey> resident_;
  std::map<PageKey, PageKey> links_;  // parents of resident pages
};

// Parents are drawn at random, so chains are torn and joined and many would be rings.
TEST_F(EvictionOrderTest, WhateverParentsAreNamedLeavesLeaveAndAllPagesCanLeave) {
  constexpr uint64_t kPages = 40;
  for (uint64_t seed = 1; seed <= 20; ++seed) {
    SCOPED_TRACE(testing::Message() << "seed " << seed);
    std::mt19937_64 random(seed);
    ChainModel model;
    const auto evict = [&] {
      const auto victim = table_.order().Victim(kNow, AnyPage);
      ASSERT_TRUE(victim) << model.resident().size() << " pages are left";
      const PageKey key = table_[*victim].key;
      ASSERT_TRUE(model.resident().contains(key));
      EXPECT_TRUE(model.IsLeaf(key));
      table_.Remove(*victim, RemovalReason::kCapacity, kNow);
      model.Remove(key);
    };
    for (int step = 0; step < 1500; ++step) {
      SampleFragment sample = SamplePage(1, random() % kPages);
      sample.parent = random() % 5 == 0 ? PageKey{} : SampleKey(1, random() % kPages);
      const PageHandle there = table_.pages().Find(sample.keyspace, sample.key);
      if (there != kNoPage) {
        table_.Remove(there, RemovalReason::kDeleted, kNow);
        model.Remove(sample.key);
      } else {
        ASSERT_TRUE(Insert(sample).ok());
        model.Insert(sample.key, sample.parent);
      }
      if (random() % 8 == 0 && !model.resident().empty()) evict();
    }
    while (!model.resident().empty() && !HasFatalFailure()) evict();
    EXPECT_FALSE(table_.order().Victim(kNow, AnyPage));
  }
}

class ChainCostTest : public testing::Test {
 protected:
  static constexpr TimePoint kNow{};

  ChainCostTest() { slots_.AddRegion(0, uint64_t{1} << 30); }

  void Insert(const PageKey& key, const PageKey& parent) {
    const FragmentMeta meta = {.keyspace = SampleKeyspace(0),
                               .key = key,
                               .parent = parent,
                               .generation = 1,
                               .range = {{0, 1}, {0, 1}},
                               .tiles_bytes = 100,
                               .bytes = 200,
                               .logical_tile_bytes = 100};
    const auto slot = slots_.Allocate(meta.bytes, SlotAllocator::kNoOwner);
    ASSERT_TRUE(table_.Insert(meta, *slot, Below::kAbsent, /*owed=*/true, kNow).ok());
  }
  void Remove(const PageKey& key) {
    table_.Remove(table_.pages().Find(SampleKeyspace(0), key), RemovalReason::kDeleted, kNow);
  }

  SlotAllocator slots_{{.granule_bytes = 512, .page_bytes = 512}};
  PageTable table_{*MakePolicy("default", 100'000), slots_};
};

// A page that comes back at the end of a long chain while many pages wait for it: a walk up the
// chain for each of these would take `kChain` times `kChildren` steps.
TEST_F(ChainCostTest, LinkingAPageCostsAsMuchAsItsLogarithm) {
  constexpr uint64_t kChain = 30'000;
  constexpr uint64_t kChildren = 30'000;
  constexpr uint64_t kRounds = 200;
  constexpr uint64_t kLog = 16;       // logarithm of the number of pages
  constexpr uint64_t kConstant = 20;  // steps for each link, cut or query of a random treap
  for (uint64_t i = 0; i < kChain; ++i) {
    Insert(SampleKey(1, i), i == 0 ? PageKey{} : SampleKey(1, i - 1));
  }
  const PageKey meeting = SampleKey(2, 0);
  for (uint64_t i = 0; i < kChildren; ++i) Insert(SampleKey(3, i), meeting);
  EXPECT_LT(table_.order().chain_steps(), kConstant * (kChain + kChildren));
  const uint64_t before = table_.order().chain_steps();
  for (uint64_t round = 0; round < kRounds; ++round) {
    Insert(meeting, SampleKey(1, kChain - 1));
    Remove(meeting);
  }
  EXPECT_LT(table_.order().chain_steps() - before, kConstant * kLog * kRounds);
}

// A recovered index may have the end of a chain first.
TEST_F(ChainCostTest, AChainThatComesBackwardsCostsNoMore) {
  constexpr uint64_t kChain = 60'000;
  for (uint64_t i = kChain; i-- > 0;) {
    Insert(SampleKey(1, i), i == 0 ? PageKey{} : SampleKey(1, i - 1));
  }
  EXPECT_LT(table_.order().chain_steps(), 20u * 16 * kChain);
  const auto victim = table_.order().Victim(kNow, AnyPage);
  ASSERT_TRUE(victim);
  EXPECT_EQ(table_[*victim].key, SampleKey(1, kChain - 1));
}

TEST_F(EvictionOrderTest, PinsEnd) {
  const auto page = Insert(SamplePage(1, 0));
  ASSERT_TRUE(page.ok());
  table_[*page].pinned_until = kNow + std::chrono::seconds(5);
  EXPECT_FALSE(table_.order().Victim(kNow, AnyPage));
  EXPECT_TRUE(table_.order().Victim(kNow + std::chrono::seconds(5), AnyPage));
}

}  // namespace
}  // namespace crumb::storage
