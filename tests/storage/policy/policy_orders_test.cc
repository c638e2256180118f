// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
// The order in which each policy evicts.
#include <gtest/gtest.h>

#include <algorithm>
#include <optional>
#include <random>
#include <vector>

#include "storage/policy/policy.h"
#include "tests/common/cpu_seconds.h"
#include "tests/storage/policy/chain_driver.h"

namespace crumb::storage {
namespace {

bool NothingPinned(ItemHandle) { return false; }

std::unique_ptr<EvictionPolicy> Make(const char* name, size_t capacity) {
  return *MakePolicy(name, capacity);
}

ItemHandle InsertAlone(EvictionPolicy& policy, uint64_t fingerprint) {
  policy.BeginAccess();
  return policy.Insert({.fingerprint = fingerprint, .parent = kNoItem});
}

ItemHandle Evict(EvictionPolicy& policy) {
  const ItemHandle victim = *policy.Victim(NothingPinned);
  policy.Remove(victim, Removal::kEvicted);
  return victim;
}

// A million calls against a model that searches all nodes.
TEST(LruPolicyTest, EvictsTheLeafUsedLongestAgo) {
  constexpr uint64_t kSeed = 20240611;
  constexpr size_t kCapacity = 30;
  SCOPED_TRACE(testing::Message() << "seed " << kSeed);
  std::mt19937_64 random(kSeed);
  ChainDriver driver(Make("lru", kCapacity), 90, random);
  for (int step = 0; step < 150000; ++step) {
    driver.Access(static_cast<int>(random() % driver.nodes()));
    const int chosen = static_cast<int>(random() % driver.nodes());
    if (random() % 8 == 0 && driver.node(chosen).handle != kNoItem) {
      driver.Remove(chosen, Removal::kDeleted);
    }
    while (driver.resident() > kCapacity) {
      int expected = -1;
      for (int i = 0; i < driver.nodes(); ++i) {
        if (driver.node(i).handle == kNoItem || !driver.IsLeaf(i)) continue;
        // In a chain that a deletion split the deeper leaf is first; its number is the higher.
        if (expected < 0 || driver.node(i).last_access <= driver.node(expected).last_access) {
          expected = i;
        }
      }
      const int victim = driver.NodeOf(*driver.policy().Victim(NothingPinned));
      ASSERT_EQ(victim, expected) << "step " << step;
      driver.Remove(victim, Removal::kEvicted);
    }
  }
}

TEST(LruPolicyTest, ParentOfAGrowingChainIsAsOldAsItsChild) {
  const std::unique_ptr<EvictionPolicy> policy = Make("lru", 10);
  const ItemHandle root = InsertAlone(*policy, 1);
  policy->BeginAccess();
  const ItemHandle child = policy->Insert({.fingerprint = 2, .parent = root});
  policy->SetHasChildren(root, true);
  const ItemHandle later = InsertAlone(*policy, 3);
  EXPECT_EQ(Evict(*policy), child);
  policy->SetHasChildren(root, false);
  EXPECT_EQ(Evict(*policy), root);
  EXPECT_EQ(Evict(*policy), later);
}

TEST(FifoPolicyTest, EvictsInOrderOfInsertionWhateverIsUsed) {
  const std::unique_ptr<EvictionPolicy> policy = Make("fifo", 10);
  std::vector<ItemHandle> items;
  for (uint64_t i = 0; i < 5; ++i) items.push_back(InsertAlone(*policy, i));
  policy->Hit(items[0]);
  for (const ItemHandle item : items) EXPECT_EQ(Evict(*policy), item);
}

TEST(S3FifoPolicyTest, PromotesWhatWasUsedTwiceAndWhatComesBack) {
  const std::unique_ptr<EvictionPolicy> policy = Make("s3fifo", 10);
  std::vector<ItemHandle> items;
  for (uint64_t i = 0; i < 10; ++i) items.push_back(InsertAlone(*policy, i));
  policy->Hit(items[0]);
  policy->Hit(items[0]);
  policy->Hit(items[1]);
  EXPECT_EQ(Evict(*policy), items[1]);  // one use is not enough; item 0 moved to the main queue
  const ItemHandle back = InsertAlone(*policy, 1);  // a ghost: straight to the main queue
  for (uint64_t i = 2; i < 10; ++i) EXPECT_EQ(Evict(*policy), items[i]);
  EXPECT_EQ(Evict(*policy), items[0]);
  EXPECT_EQ(Evict(*policy), back);
}

TEST(S3FifoPolicyTest, MainQueueGivesOneRoundPerUse) {
  const std::unique_ptr<EvictionPolicy> policy = Make("s3fifo", 10);
  std::vector<ItemHandle> items;
  for (uint64_t i = 0; i < 3; ++i) {
    InsertAlone(*policy, i);
    Evict(*policy);
    items.push_back(InsertAlone(*policy, i));  // now in the main queue
  }
  policy->Hit(items[0]);
  EXPECT_EQ(Evict(*policy), items[1]);
  EXPECT_EQ(Evict(*policy), items[2]);
  EXPECT_EQ(Evict(*policy), items[0]);
}

// Ten items that are used again and again among many that never are.
TEST(DefaultPolicyTest, LearnsToKeepWhatComesBack) {
  constexpr size_t kCapacity = 100;
  constexpr uint64_t kHot = 10;
  constexpr uint64_t kColdBetween = 40;  // per hot use: an LRU of 100 has forgotten it by then
  const auto hits_of = [&](const char* name) {
    const std::unique_ptr<EvictionPolicy> policy = Make(name, kCapacity);
    std::vector<ItemHandle> hot(kHot, kNoItem);
    uint64_t cold = kHot;
    int hits = 0;
    for (int use = 0; use < 2000; ++use) {
      ItemHandle& item = hot[use % kHot];
      if (item != kNoItem) {
        ++hits;
        policy->BeginAccess();
        policy->Hit(item);
      } else {
        item = InsertAlone(*policy, use % kHot);
      }
      for (uint64_t i = 0; i < kColdBetween; ++i) InsertAlone(*policy, cold++);
      while (policy->Usage().items > kCapacity) {
        const ItemHandle victim = Evict(*policy);
        std::replace(hot.begin(), hot.end(), victim, kNoItem);
      }
    }
    return hits;
  };
  EXPECT_EQ(hits_of("lru"), 0);
  EXPECT_GT(hits_of("default"), 1500);
}

// The main queue is pinned as a whole and the small one at its end. Each call may look at fewer
// items than there are, and goes on where the last one ended.
// A tier calls BeginAccess with its lock held. In a small tier every item is sampled, and the
// access before may have read as many pages as a request may name.
TEST(DefaultPolicyTest, TheEndOfALongAccessTakesLittleTime) {
  constexpr uint64_t kItems = 16'384;
  const auto policy = MakePolicy("default", 512).value();
  std::vector<ItemHandle> chain;
  for (uint64_t i = 0; i < kItems; ++i) {
    policy->BeginAccess();
    const ItemHandle parent = chain.empty() ? kNoItem : chain.back();
    chain.push_back(policy->Insert({.fingerprint = i * 0x9e3779b97f4a7c15, .parent = parent}));
    if (parent != kNoItem) policy->SetHasChildren(parent, true);
  }
  double best = 1;
  for (int round = 0; round < 4; ++round) {
    policy->BeginAccess();
    for (size_t i = chain.size(); i-- > 0;) policy->Hit(chain[i]);
    const double before = ThreadCpuSeconds();
    policy->BeginAccess();
    best = std::min(best, ThreadCpuSeconds() - before);
  }
  EXPECT_LT(best, 0.005) << "seconds";
}

TEST(S3FifoPolicyTest, ABoundedSearchGetsToAVictimBehindPinnedItems) {
  constexpr size_t kMain = 300;
  constexpr size_t kSmall = 60;
  const std::unique_ptr<EvictionPolicy> policy = Make("s3fifo", kMain + kSmall);
  std::vector<ItemHandle> items;
  for (size_t i = 0; i < kMain + kSmall; ++i) {
    items.push_back(InsertAlone(*policy, i));
    for (int uses = 0; i < kMain && uses < 2; ++uses) policy->Hit(items.back());
  }
  const auto is_pinned = [&](ItemHandle item) { return item != items.back(); };
  constexpr size_t kStepsPerCall = 100;
  std::optional<ItemHandle> victim;
  for (int calls = 0; calls < 100 && !victim; ++calls) {
    size_t steps = kStepsPerCall;
    victim = policy->FindVictim(is_pinned, steps);
    EXPECT_TRUE(victim || steps == 0) << "it has seen all, but not the one that may go";
  }
  EXPECT_EQ(victim, items.back());
}

}  // namespace
}  // namespace crumb::storage
