// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
// The contract of every eviction policy, whatever its order.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>
#include <set>
#include <string>
#include <vector>

#include "storage/policy/chain_counts.h"
#include "storage/policy/policy.h"
#include "tests/storage/policy/chain_driver.h"

namespace crumb::storage {
namespace {

constexpr size_t kCapacity = 60;
constexpr int kNodes = 240;

std::unique_ptr<EvictionPolicy> Make(const std::string& name, size_t capacity = kCapacity) {
  absl::StatusOr<std::unique_ptr<EvictionPolicy>> policy = MakePolicy(name, capacity);
  EXPECT_TRUE(policy.ok()) << policy.status();
  return *std::move(policy);
}

bool NothingPinned(ItemHandle) { return false; }

class PolicyContractTest : public ::testing::TestWithParam<std::string> {};

// The contract of all policies but fifo, which knows no chains.
class LeafFirstContractTest : public ::testing::TestWithParam<std::string> {};

// Accesses, evictions with pins and deletions at random. Returns the nodes evicted, in order.
std::vector<int> RunAtRandom(const std::string& name, uint64_t seed, int steps) {
  std::mt19937_64 random(seed);
  ChainDriver driver(Make(name), kNodes, random);
  std::set<int> pinned;
  std::vector<int> evicted;
  const auto is_pinned = [&](ItemHandle item) { return pinned.contains(driver.NodeOf(item)); };
  for (int step = 0; step < steps; ++step) {
    driver.Access(static_cast<int>(random() % kNodes));
    const int chosen = static_cast<int>(random() % kNodes);
    if (driver.node(chosen).handle != kNoItem) {
      if (random() % 16 == 0 && !pinned.contains(chosen)) {
        driver.Remove(chosen, Removal::kDeleted);
      } else if (random() % 4 == 0) {
        pinned.insert(chosen);
      }
    }
    if (pinned.size() > kCapacity / 3) pinned.clear();
    while (driver.resident() > kCapacity) {
      const std::optional<ItemHandle> victim = driver.policy().Victim(is_pinned);
      if (!victim) {
        // Only possible when every leaf is pinned.
        for (int i = 0; i < kNodes; ++i) {
          if (driver.node(i).handle == kNoItem || pinned.contains(i)) continue;
          EXPECT_FALSE(name != "fifo" && driver.IsLeaf(i)) << name << " overlooked node " << i;
        }
        pinned.clear();
        continue;
      }
      const int node = driver.NodeOf(*victim);
      if (node < 0 || pinned.contains(node) || (name != "fifo" && !driver.IsLeaf(node))) {
        ADD_FAILURE() << name << " step " << step << " chose node " << node;
        return evicted;
      }
      evicted.push_back(node);
      driver.Remove(node, Removal::kEvicted);
    }
    EXPECT_EQ(driver.policy().Usage().items, driver.resident());
  }
  return evicted;
}

TEST_P(PolicyContractTest, VictimsAreResidentUnpinnedLeaves) {
  for (const uint64_t seed : {1u, 2u, 3u}) {
    SCOPED_TRACE(testing::Message() << "seed " << seed);
    EXPECT_GT(RunAtRandom(GetParam(), seed, 10000).size(), 1000u);
  }
}

TEST_P(PolicyContractTest, SameCallsGiveSameVictims) {
  EXPECT_EQ(RunAtRandom(GetParam(), 7, 3000), RunAtRandom(GetParam(), 7, 3000));
  EXPECT_NE(RunAtRandom(GetParam(), 7, 3000), RunAtRandom(GetParam(), 8, 3000));
}

TEST_P(PolicyContractTest, EmptyPolicyHasNoVictim) {
  EXPECT_EQ(Make(GetParam())->Victim(NothingPinned), std::nullopt);
}

TEST_P(PolicyContractTest, FindsTheOneUnpinnedItemAgainAndAgain) {
  const std::unique_ptr<EvictionPolicy> policy = Make(GetParam());
  std::vector<ItemHandle> items;
  for (uint64_t i = 0; i < 100; ++i) {
    policy->BeginAccess();
    items.push_back(policy->Insert({.fingerprint = i, .parent = kNoItem}));
  }
  for (const ItemHandle free : items) {
    const auto is_pinned = [&](ItemHandle item) { return item != free; };
    EXPECT_EQ(policy->Victim(is_pinned), free);
  }
  EXPECT_EQ(policy->Victim([](ItemHandle) { return true; }), std::nullopt);
  EXPECT_NE(policy->Victim(NothingPinned), std::nullopt);
}

TEST_P(LeafFirstContractTest, AllItemsOfAChainLeaveLeafFirst) {
  const std::unique_ptr<EvictionPolicy> policy = Make(GetParam());
  policy->BeginAccess();
  std::vector<ItemHandle> chain;
  ChainCounts counts;
  for (uint64_t i = 0; i < 50; ++i) {
    chain.push_back(counts.Insert(
        *policy, {.fingerprint = i, .parent = chain.empty() ? kNoItem : chain.back()}));
  }
  while (!chain.empty()) {
    EXPECT_EQ(policy->Victim(NothingPinned), chain.back());
    counts.Remove(*policy, chain.back(), Removal::kEvicted);
    chain.pop_back();
  }
  EXPECT_EQ(policy->Victim(NothingPinned), std::nullopt);
}

TEST_P(LeafFirstContractTest, ParentsStayForTheirChildrenWhicheverCameFirst) {
  const std::unique_ptr<EvictionPolicy> policy = Make(GetParam());
  policy->BeginAccess();
  const ItemHandle parent = policy->Insert({.fingerprint = 1, .has_children = true});
  policy->BeginAccess();
  const ItemHandle child = policy->Insert({.fingerprint = 2});
  EXPECT_EQ(policy->Victim(NothingPinned), child);
  policy->Remove(child, Removal::kDeleted);
  policy->SetHasChildren(parent, false);
  EXPECT_EQ(policy->Victim(NothingPinned), parent);
}

// However many items are pinned, a search looks at as many as it may, and the next one goes on.
TEST_P(PolicyContractTest, ASearchLooksAtNoMoreItemsThanItMay) {
  constexpr size_t kItems = 10'000;
  constexpr size_t kSteps = 64;
  const std::unique_ptr<EvictionPolicy> policy = Make(GetParam(), kItems);
  std::vector<ItemHandle> items;
  for (uint64_t i = 0; i < kItems; ++i) {
    policy->BeginAccess();
    items.push_back(policy->Insert({.fingerprint = i}));
  }
  size_t looked = 0;
  const auto find = [&](ItemHandle free) {
    std::optional<ItemHandle> victim;
    for (size_t call = 0; call < 10 * kItems / kSteps && !victim; ++call) {
      size_t steps = kSteps;
      looked = 0;
      victim = policy->FindVictim(
          [&](ItemHandle item) {
            ++looked;
            return item != free;
          },
          steps);
      EXPECT_LE(looked, kSteps);
      if (!victim) {
        EXPECT_LE(steps, 1u) << "gave up before its end";
      }
    }
    return victim;
  };
  EXPECT_EQ(find(items[kItems - 1]), items[kItems - 1]);
  EXPECT_EQ(find(items[kItems / 2]), items[kItems / 2]);
  EXPECT_EQ(find(kNoItem), std::nullopt);
}

TEST_P(PolicyContractTest, MemoryOfThePastIsBounded) {
  const std::unique_ptr<EvictionPolicy> policy = Make(GetParam(), /*capacity=*/100);
  size_t ghosts_before = 0;
  size_t bytes_before = 0;
  for (uint64_t i = 0; i < 20000; ++i) {
    policy->BeginAccess();
    policy->Insert({.fingerprint = i, .parent = kNoItem});
    if (policy->Usage().items > 100) {
      const std::optional<ItemHandle> victim = policy->Victim(NothingPinned);
      ASSERT_TRUE(victim.has_value());
      policy->Remove(*victim, Removal::kEvicted);
    }
    if (i == 10000) {
      ghosts_before = policy->Usage().ghosts;
      bytes_before = policy->Usage().memory_bytes;
    }
  }
  EXPECT_LE(policy->Usage().ghosts, 800u);
  EXPECT_EQ(policy->Usage().ghosts, ghosts_before);
  EXPECT_LE(policy->Usage().memory_bytes, bytes_before);
}

INSTANTIATE_TEST_SUITE_P(All, PolicyContractTest, ::testing::ValuesIn(PolicyNames()));

INSTANTIATE_TEST_SUITE_P(All, LeafFirstContractTest, ::testing::Values("default", "lru", "s3fifo"));

TEST(MakePolicyTest, KnowsItsNames) {
  EXPECT_THAT(PolicyNames(), ::testing::UnorderedElementsAre("default", "lru", "fifo", "s3fifo"));
  for (const std::string& name : PolicyNames()) EXPECT_EQ(Make(name)->name(), name);
}

TEST(MakePolicyTest, UnknownNameListsTheKnown) {
  const absl::Status status = MakePolicy("mru", 10).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()), ::testing::HasSubstr("'mru'"));
  EXPECT_THAT(std::string(status.message()), ::testing::HasSubstr("default, lru, s3fifo, fifo"));
}

}  // namespace
}  // namespace crumb::storage
