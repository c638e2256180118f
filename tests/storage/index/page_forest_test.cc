// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "storage/index/page_forest.h"

#include <map>
#include <random>
#include <vector>

#include "gtest/gtest.h"

namespace crumb::storage {
namespace {

// A forest as a map from nodes to parents.
class ParentMap {
 public:
  ForestHandle RootOf(ForestHandle node) const {
    for (auto up = parents_.find(node); up != parents_.end(); up = parents_.find(node)) {
      node = up->second;
    }
    return node;
  }
  bool IsRoot(ForestHandle node) const { return !parents_.contains(node); }
  bool IsLeaf(ForestHandle node) const {
    for (const auto& [child, parent] : parents_) {
      if (parent == node) return false;
    }
    return true;
  }
  void Link(ForestHandle child, ForestHandle parent) { parents_[child] = parent; }
  void Cut(ForestHandle node) { parents_.erase(node); }

 private:
  std::map<ForestHandle, ForestHandle> parents_;
};

TEST(PageForestTest, AgreesWithAMapOfParents) {
  for (uint64_t seed = 1; seed <= 10; ++seed) {
    SCOPED_TRACE(testing::Message() << "seed " << seed);
    std::mt19937_64 random(seed);
    PageForest forest;
    ParentMap model;
    std::vector<ForestHandle> nodes;
    for (int step = 0; step < 4000; ++step) {
      if (nodes.size() < 3 || random() % 8 == 0) nodes.push_back(forest.Add());
      const size_t place = random() % nodes.size();
      const ForestHandle a = nodes[place];
      const ForestHandle b = nodes[random() % nodes.size()];
      ASSERT_EQ(forest.SameTree(a, b), model.RootOf(a) == model.RootOf(b)) << "step " << step;
      if (model.IsRoot(a) && model.RootOf(a) != model.RootOf(b)) {
        forest.Link(a, b);
        model.Link(a, b);
      } else if (!model.IsRoot(a) && random() % 4 == 0) {
        forest.Cut(a);
        model.Cut(a);
      } else if (model.IsLeaf(a) && random() % 4 == 0) {
        forest.Remove(a);
        model.Cut(a);
        nodes.erase(nodes.begin() + static_cast<std::ptrdiff_t>(place));
      }
    }
  }
}

// The mean over many queries, which no order of links can make worse.
TEST(PageForestTest, QueriesCostALogarithmHoweverDeepTheTreeIs) {
  constexpr int kNodes = 1 << 15;
  PageForest forest;
  std::vector<ForestHandle> chain = {forest.Add()};
  for (int i = 1; i < kNodes; ++i) {
    chain.push_back(forest.Add());
    forest.Link(chain.back(), chain[chain.size() - 2]);
  }
  EXPECT_LT(forest.steps(), 20u * kNodes);
  const uint64_t before = forest.steps();
  for (int i = 0; i < kNodes; ++i) EXPECT_TRUE(forest.SameTree(chain[0], chain[i]));
  EXPECT_LT(forest.steps() - before, uint64_t{2} * 64 * kNodes);
}

}  // namespace
}  // namespace crumb::storage
