// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
// Runs of pages whose parents a writer chooses: chains, rings, and endless chains. The cost is
// counted in reads of the store.
#include "server/cluster/run_finder.h"

#include <gtest/gtest.h>

#include <map>

#include "tests/server/call_fixture.h"

namespace crumb::server {
namespace {

// A store whose pages have the parents that the test gives them.
class ParentStore final : public MemoryStore {
 public:
  ParentStore() : MemoryStore(4, 1 << 16, {}) {}

  std::optional<PageKey> ParentOf(const KeyspaceId&, const PageKey& key) const override {
    ++looks;
    const auto found = parents.find(key);
    if (found == parents.end()) return std::nullopt;
    return found->second;
  }

  std::map<PageKey, PageKey> parents;
  mutable uint64_t looks = 0;
};

class RunFinderTest : public CallFixture {
 protected:
  // Without a position, as a writer may leave it out.
  FragmentHeader Page(int number, const PageKey& parent) {
    FragmentHeader header;
    header.key = Key(number);
    header.parent = parent;
    header.keyspace = keyspace_->id;
    return header;
  }
  // Pages first to first + length - 1, each the parent of the next one.
  void AddChain(int first, int length) {
    for (int page = first; page < first + length; ++page) {
      store_of_parents_.parents[Key(page)] = page == first ? PageKey{} : Key(page - 1);
    }
  }
  // Adds a ring: a chain whose last page is the parent of the first.
  void AddRing(int first, int length) {
    AddChain(first, length);
    store_of_parents_.parents[Key(first)] = Key(first + length - 1);
  }
  std::optional<PageKey> Find(int page) {
    return runs_.Find(Page(page, store_of_parents_.parents.at(Key(page))));
  }

  ParentStore store_of_parents_;
  RunFinder runs_{store_of_parents_, 1 << 18};
};

TEST_F(RunFinderTest, EveryPageOfAChainIsPlacedInTheRunOfItsPosition) {
  AddChain(0, 200);
  // From the end: the walk for the last one places all of them.
  for (int page = 199; page >= 0; --page) EXPECT_EQ(Find(page), Key(page / 32 * 32)) << page;
  EXPECT_LE(store_of_parents_.looks, 200u);
}

TEST_F(RunFinderTest, PagesOfRingsHaveNoRunAndTakeStepsInProportionToARun) {
  constexpr int kRings = 50;
  constexpr int kLength = 1000;
  for (int ring = 0; ring < kRings; ++ring) AddRing(ring * kLength, kLength);
  uint64_t pages = 0;
  for (int i = 0; i < kLength; i += 10) {
    for (int ring = 0; ring < kRings; ++ring, ++pages) {
      EXPECT_EQ(Find(ring * kLength + i), std::nullopt);
    }
  }
  EXPECT_LE(store_of_parents_.looks, pages * kRunPages + RunFinder::kWalkStepsMax);
}

TEST_F(RunFinderTest, AShortRingIsNoticedAfterItsOwnLength) {
  for (int length : {1, 2, 3, 7, 32, 100}) {
    AddRing(0, length);
    // A stem of five pages that leads into the ring.
    AddChain(1000, 5);
    store_of_parents_.parents[Key(1000)] = Key(0);
    store_of_parents_.looks = 0;
    EXPECT_EQ(Find(1004), std::nullopt);
    EXPECT_LE(store_of_parents_.looks, 4u * static_cast<uint64_t>(length + 5)) << length;
  }
}

TEST_F(RunFinderTest, AChainThatIsTooLongSparesTheOthers) {
  AddChain(0, 3 * static_cast<int>(RunFinder::kWalkStepsMax));
  EXPECT_EQ(Find(3 * static_cast<int>(RunFinder::kWalkStepsMax) - 1), std::nullopt);
  EXPECT_LE(store_of_parents_.looks, RunFinder::kWalkStepsMax);
  // Pages that hang on known ones, and short chains, are placed as before.
  AddChain(100'000, 20);
  EXPECT_EQ(Find(100'019), Key(100'000));
  EXPECT_EQ(Find(0), Key(0));
  EXPECT_EQ(Find(1), Key(0));
}

}  // namespace
}  // namespace crumb::server
