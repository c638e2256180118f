// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "storage/page_table.h"

#include <algorithm>
#include <map>
#include <random>
#include <set>

#include "gtest/gtest.h"
#include "storage/policy/policy.h"
#include "tests/storage/sample_fragment.h"

namespace crumb::storage {
namespace {

constexpr TimePoint kNow{};
bool AnyPage(const Page&) { return true; }

class PageTableTest : public testing::Test {
 protected:
  PageTableTest() { table_.slots().AddRegion(0, uint64_t{8} << 20); }

  absl::StatusOr<PageHandle> Insert(const SampleFragment& sample) {
    const FragmentMeta meta = MetaOf(sample);
    const auto slot = table_.slots().Allocate(meta.bytes, SlotAllocator::kNoOwner);
    auto page = table_.Insert(meta, *slot, Below::kAbsent, /*owed=*/true, kNow);
    if (!page.ok()) table_.slots().Free(*slot);
    return page;
  }

  PageTable table_{*MakePolicy("lru", 1000), {.granule_bytes = 512, .page_bytes = 512}};
};

TEST_F(PageTableTest, LeavesGoBeforeTheirAncestorsInWhateverOrderTheyCame) {
  for (const uint64_t number : {2, 0, 3, 1}) ASSERT_TRUE(Insert(SamplePage(1, number)).ok());
  for (const uint64_t number : {3, 2, 1, 0}) {
    const auto victim = table_.Victim(kNow, AnyPage);
    ASSERT_TRUE(victim);
    EXPECT_EQ(table_[*victim].key, SampleKey(1, number));
    table_.Remove(*victim, RemovalReason::kCapacity, kNow);
  }
  EXPECT_FALSE(table_.Victim(kNow, AnyPage));
  EXPECT_EQ(table_.slots().used_bytes(), 0u);
}

TEST_F(PageTableTest, AParentThatComesBackIsAParentAgain) {
  for (uint64_t number = 0; number < 3; ++number) ASSERT_TRUE(Insert(SamplePage(1, number)).ok());
  table_.Remove(table_.Find(SampleKeyspace(0), SampleKey(1, 1)), RemovalReason::kDeleted, kNow);
  ASSERT_TRUE(Insert(SamplePage(1, 1)).ok());
  const auto victim = table_.Victim(kNow, AnyPage);
  ASSERT_TRUE(victim);
  EXPECT_EQ(table_[*victim].key, SampleKey(1, 2));
}

TEST_F(PageTableTest, ARingOfParentsCanStillBeEvicted) {
  for (uint64_t i = 0; i < 3; ++i) {
    SampleFragment sample = SamplePage(1, i);
    sample.parent = SampleKey(1, (i + 1) % 3);
    ASSERT_TRUE(Insert(sample).ok());
  }
  SampleFragment own_parent = SamplePage(2, 0);
  own_parent.parent = own_parent.key;
  ASSERT_TRUE(Insert(own_parent).ok());
  for (int i = 0; i < 4; ++i) {
    const auto victim = table_.Victim(kNow, AnyPage);
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
TEST_F(PageTableTest, WhateverParentsAreNamedLeavesLeaveAndAllPagesCanLeave) {
  constexpr uint64_t kPages = 40;
  for (uint64_t seed = 1; seed <= 20; ++seed) {
    SCOPED_TRACE(testing::Message() << "seed " << seed);
    std::mt19937_64 random(seed);
    ChainModel model;
    const auto evict = [&] {
      const auto victim = table_.Victim(kNow, AnyPage);
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
      const PageHandle there = table_.Find(sample.keyspace, sample.key);
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
    EXPECT_FALSE(table_.Victim(kNow, AnyPage));
  }
}

class ChainCostTest : public testing::Test {
 protected:
  ChainCostTest() { table_.slots().AddRegion(0, uint64_t{1} << 30); }

  void Insert(const PageKey& key, const PageKey& parent) {
    const FragmentMeta meta = {.keyspace = SampleKeyspace(0),
                               .key = key,
                               .parent = parent,
                               .generation = 1,
                               .range = {{0, 1}, {0, 1}},
                               .tiles_bytes = 100,
                               .bytes = 200,
                               .logical_tile_bytes = 100};
    const auto slot = table_.slots().Allocate(meta.bytes, SlotAllocator::kNoOwner);
    ASSERT_TRUE(table_.Insert(meta, *slot, Below::kAbsent, /*owed=*/true, kNow).ok());
  }
  void Remove(const PageKey& key) {
    table_.Remove(table_.Find(SampleKeyspace(0), key), RemovalReason::kDeleted, kNow);
  }

  PageTable table_{*MakePolicy("default", 100'000), {.granule_bytes = 512, .page_bytes = 512}};
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
  EXPECT_LT(table_.chain_steps(), kConstant * (kChain + kChildren));
  const uint64_t before = table_.chain_steps();
  for (uint64_t round = 0; round < kRounds; ++round) {
    Insert(meeting, SampleKey(1, kChain - 1));
    Remove(meeting);
  }
  EXPECT_LT(table_.chain_steps() - before, kConstant * kLog * kRounds);
}

// A recovered index may have the end of a chain first.
TEST_F(ChainCostTest, AChainThatComesBackwardsCostsNoMore) {
  constexpr uint64_t kChain = 60'000;
  for (uint64_t i = kChain; i-- > 0;) {
    Insert(SampleKey(1, i), i == 0 ? PageKey{} : SampleKey(1, i - 1));
  }
  EXPECT_LT(table_.chain_steps(), 20u * 16 * kChain);
  const auto victim = table_.Victim(kNow, AnyPage);
  ASSERT_TRUE(victim);
  EXPECT_EQ(table_[*victim].key, SampleKey(1, kChain - 1));
}

TEST_F(PageTableTest, AWalkInPiecesSeesEveryPageOnce) {
  constexpr uint64_t kPages = 100;
  for (uint64_t i = 0; i < kPages; ++i) {
    SampleFragment sample = SamplePage(1, i);
    ASSERT_TRUE(Insert(sample).ok());
    sample.keyspace = SampleKeyspace(1);
    ASSERT_TRUE(Insert(sample).ok());
  }
  for (const size_t piece : {size_t{7}, size_t{100}, size_t{1000}}) {
    std::multiset<PageKey> seen;
    size_t pieces = 0;
    for (PageHandle next = 0; next != kNoPage; ++pieces) {
      next = table_.Scan(SampleKeyspace(1), next, piece, [&](PageHandle handle, const Page& page) {
        EXPECT_EQ(page.keyspace, SampleKeyspace(1));
        EXPECT_EQ(&table_[handle], &page);
        seen.insert(page.key);
      });
    }
    EXPECT_EQ(seen.size(), kPages);
    EXPECT_EQ(std::set<PageKey>(seen.begin(), seen.end()).size(), kPages);
    EXPECT_EQ(pieces == 1, piece >= kPages);
  }
  EXPECT_EQ(table_.Scan(SampleKeyspace(7), 0, 10, [](PageHandle, const Page&) { FAIL(); }),
            kNoPage);
}

TEST_F(PageTableTest, APageHasNoMoreFragmentsThanItMay) {
  table_.SetPageFragmentsMax(2);
  SampleFragment sample = SamplePage(1, 0);
  for (uint16_t head = 0; head < 3; ++head) {
    sample.range.heads = {head, static_cast<uint16_t>(head + 1)};
    EXPECT_EQ(Insert(sample).status().code(),
              head < 2 ? absl::StatusCode::kOk : absl::StatusCode::kResourceExhausted);
  }
}

TEST_F(PageTableTest, ExpiredPinsEndPieceByPiece) {
  table_.BoundHeldBytes(uint64_t{8} << 20, 50);
  table_.SetTenant(SampleKeyspace(0), "a");
  constexpr uint64_t kPages = 10;
  const TimePoint soon = kNow + std::chrono::minutes(1);
  uint64_t bytes = 0;
  for (uint64_t sequence = 0; sequence < kPages; ++sequence) {
    const auto page = Insert(SamplePage(sequence, 0));
    ASSERT_TRUE(page.ok());
    bytes = table_[*page].slots_bytes;
    ASSERT_TRUE(table_.Pin(SampleKeyspace(0), SampleKey(sequence, 0), 0, soon));
  }
  EXPECT_EQ(table_.held_bytes(), kPages * bytes);
  EXPECT_EQ(table_.ExpirePins(kNow, kPages), 0u);
  const TimePoint late = soon + std::chrono::hours(1);
  ASSERT_TRUE(table_.Pin(SampleKeyspace(0), SampleKey(0, 0), 0, late)) << "again, for longer";
  table_.Unpin(SampleKeyspace(0), SampleKey(1, 0));
  table_.Unpin(SampleKeyspace(0), SampleKey(77, 0));
  EXPECT_EQ(table_.held_bytes(), (kPages - 1) * bytes);
  EXPECT_EQ(table_.ExpirePins(soon, 3), 3u);
  EXPECT_EQ(table_.held_bytes(), (kPages - 4) * bytes);
  EXPECT_EQ(table_.ExpirePins(soon, kPages), kPages - 5);
  EXPECT_EQ(table_.held_bytes(), bytes) << "page 0 alone";
  ASSERT_TRUE(table_.Hold(table_.Find(SampleKeyspace(0), SampleKey(0, 0)), /*bounded=*/true));
  EXPECT_EQ(table_.ExpirePins(late, kPages), 1u);
  EXPECT_EQ(table_.held_bytes(), bytes) << "it is leased";
  table_.Unhold(table_.Find(SampleKeyspace(0), SampleKey(0, 0)));
  EXPECT_EQ(table_.held_bytes(), 0u);
}

// A pin of a page that the tier below has, and the fragments that come afterwards.
TEST_F(PageTableTest, APinBelowCountsWhatIsCommittedToItsPage) {
  table_.BoundHeldBytes(uint64_t{8} << 20, 50);
  table_.SetTenant(SampleKeyspace(0), "a");
  const TimePoint until = kNow + std::chrono::hours(1);
  ASSERT_TRUE(table_.Pin(SampleKeyspace(0), SampleKey(1, 0), 1000, until));
  EXPECT_EQ(table_.held_bytes(), 1000u);
  const auto page = Insert(SamplePage(1, 0));
  ASSERT_TRUE(page.ok());
  EXPECT_EQ(table_.held_bytes(), 1000 + table_[*page].slots_bytes);
  table_.ForgetBelow(SampleKeyspace(0), SampleKey(1, 0));
  EXPECT_EQ(table_.held_bytes(), 0u);
}

TEST_F(PageTableTest, ReferredSlotsOutliveTheirPage) {
  const auto page = Insert(SamplePage(1, 0));
  ASSERT_TRUE(page.ok());
  table_.Ref(*page);
  table_.Ref(*page);
  table_.Remove(*page, RemovalReason::kDeleted, kNow);
  EXPECT_EQ(table_.Find(SampleKeyspace(0), SampleKey(1, 0)), kNoPage);
  EXPECT_GT(table_.slots().used_bytes(), 0u);
  table_.Unref(*page);
  EXPECT_GT(table_.slots().used_bytes(), 0u);
  table_.Unref(*page);
  EXPECT_EQ(table_.slots().used_bytes(), 0u);
  EXPECT_EQ(table_.Stats().waste_bytes, 0u);
  EXPECT_EQ(table_.Stats().resident_logical_bytes, 0u);
}

TEST_F(PageTableTest, FragmentsOfAPageNeverOverlap) {
  SampleFragment left = SamplePage(1, 0);
  left.range.heads = {0, 1};
  SampleFragment right = left;
  right.range.heads = {1, 2};
  const auto page = Insert(left);
  ASSERT_TRUE(page.ok());
  EXPECT_FALSE(table_[*page].Covers({{0, 2}, {0, 2}}));
  EXPECT_TRUE(absl::IsAlreadyExists(Insert(SamplePage(1, 0)).status()));
  EXPECT_EQ(*Insert(right), *page);
  EXPECT_TRUE(table_[*page].Covers({{0, 2}, {0, 2}}));
  EXPECT_TRUE(absl::IsAlreadyExists(Insert(right).status()));
  EXPECT_EQ(table_.Stats().pages, 1u);
}

TEST_F(PageTableTest, NewerGenerationsReplaceOlderOnes) {
  SampleFragment sample = SamplePage(1, 0);
  sample.generation = 5;
  ASSERT_TRUE(Insert(sample).ok());
  sample.generation = 4;
  EXPECT_TRUE(absl::IsAborted(Insert(sample).status()));
  sample.generation = 6;
  const auto page = Insert(sample);
  ASSERT_TRUE(page.ok());
  EXPECT_EQ(table_[*page].generation, 6u);
  EXPECT_EQ(table_.Stats().pages, 1u);
  table_.RaiseGeneration(sample.keyspace, 7);
  EXPECT_EQ(table_.PagesOlderThan(sample.keyspace, 7).size(), 1u);
  EXPECT_TRUE(absl::IsAborted(Insert(sample).status()));
}

TEST_F(PageTableTest, PinsEnd) {
  const auto page = Insert(SamplePage(1, 0));
  ASSERT_TRUE(page.ok());
  table_[*page].pinned_until = kNow + std::chrono::seconds(5);
  EXPECT_FALSE(table_.Victim(kNow, AnyPage));
  EXPECT_TRUE(table_.Victim(kNow + std::chrono::seconds(5), AnyPage));
}

}  // namespace
}  // namespace crumb::storage
