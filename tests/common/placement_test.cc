// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "common/placement.h"

#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <set>

#include "common/sha256.h"

namespace crumb {
namespace {

constexpr int kRuns = 20'000;

PageKey RunNamed(int number) {
  PageKey key;
  key.bytes = Sha256("run " + std::to_string(number));
  return key;
}

PlacementNode Node(int number, double weight = 1, std::string host = "", std::string zone = "") {
  PlacementNode node;
  node.id = "node-" + std::to_string(number);
  node.weight = weight;
  node.host = host.empty() ? "host-" + std::to_string(number) : std::move(host);
  node.zone = std::move(zone);
  node.digest = NodeDigest(node.id);
  return node;
}

std::vector<PlacementNode> Nodes(int count) {
  std::vector<PlacementNode> nodes;
  for (int i = 0; i < count; ++i) nodes.push_back(Node(i));
  return nodes;
}

std::string HomeOf(const std::vector<PlacementNode>& nodes, int run) {
  return nodes[HomesOf(nodes, RunNamed(run), 1).at(0)].id;
}

TEST(PlacementTest, SharesFollowTheWeights) {
  const std::vector<PlacementNode> nodes = {Node(0, 1), Node(1, 2), Node(2, 4), Node(3, 0.5)};
  std::map<std::string, int> runs;
  for (int run = 0; run < kRuns; ++run) ++runs[HomeOf(nodes, run)];
  for (const PlacementNode& node : nodes) {
    const double share = node.weight / 7.5;
    const double sigma = std::sqrt(kRuns * share * (1 - share));
    EXPECT_NEAR(runs[node.id], kRuns * share, 4.5 * sigma) << node.id;
  }
}

TEST(PlacementTest, ANewNodeTakesItsShareAndMovesNothingElse) {
  const std::vector<PlacementNode> before = Nodes(9);
  const std::vector<PlacementNode> after = Nodes(10);
  int moved = 0;
  for (int run = 0; run < kRuns; ++run) {
    const std::string now = HomeOf(after, run);
    if (now == HomeOf(before, run)) continue;
    EXPECT_EQ(now, "node-9");
    ++moved;
  }
  EXPECT_NEAR(moved, kRuns / 10.0, 4.5 * std::sqrt(kRuns * 0.09));
}

TEST(PlacementTest, ANodeThatGoesLosesItsOwnRunsOnly) {
  const std::vector<PlacementNode> before = Nodes(10);
  std::vector<PlacementNode> after = before;
  after.erase(after.begin() + 4);
  for (int run = 0; run < kRuns; ++run) {
    const std::string home = HomeOf(before, run);
    if (home == "node-4") continue;
    EXPECT_EQ(HomeOf(after, run), home);
  }
}

TEST(PlacementTest, AHigherWeightTakesFromOthersAndGivesNothingAway) {
  const std::vector<PlacementNode> before = Nodes(5);
  std::vector<PlacementNode> after = before;
  after[2].weight = 3;
  for (int run = 0; run < kRuns; ++run) {
    const std::string now = HomeOf(after, run);
    if (now == HomeOf(before, run)) continue;
    EXPECT_EQ(now, "node-2");
  }
}

TEST(PlacementTest, TheOrderOfTheViewDoesNotMatter) {
  const std::vector<PlacementNode> nodes = Nodes(12);
  const std::vector<PlacementNode> reversed(nodes.rbegin(), nodes.rend());
  for (int run = 0; run < 200; ++run) {
    const std::vector<size_t> a = HomesOf(nodes, RunNamed(run), 3);
    const std::vector<size_t> b = HomesOf(reversed, RunNamed(run), 3);
    ASSERT_EQ(a.size(), b.size());
    for (size_t i = 0; i < a.size(); ++i) EXPECT_EQ(nodes[a[i]].id, reversed[b[i]].id);
  }
}

TEST(PlacementTest, ReplicasLieOnDistinctHostsAndZones) {
  std::vector<PlacementNode> nodes;
  for (int i = 0; i < 12; ++i) {
    nodes.push_back(Node(i, 1, "host-" + std::to_string(i / 2), "zone-" + std::to_string(i / 4)));
  }
  for (int run = 0; run < 500; ++run) {
    const std::vector<size_t> homes = HomesOf(nodes, RunNamed(run), 5);
    ASSERT_EQ(homes.size(), 5u);
    std::set<std::string> hosts, zones;
    for (size_t i = 0; i < homes.size(); ++i) {
      hosts.insert(nodes[homes[i]].host);
      if (i < 3) zones.insert(nodes[homes[i]].zone);
    }
    EXPECT_EQ(hosts.size(), 5u);
    EXPECT_EQ(zones.size(), 3u);  // all zones
  }
}

TEST(PlacementTest, NoTwoReplicasOnOneHostForAnyPage) {
  std::vector<PlacementNode> nodes;
  for (int i = 0; i < 6; ++i) nodes.push_back(Node(i, 1, i < 3 ? "one" : "two"));
  EXPECT_EQ(HomesOf(nodes, RunNamed(1), 4).size(), 2u);
  EXPECT_TRUE(HomesOf(nodes, RunNamed(1), 0).empty());
  EXPECT_TRUE(HomesOf({}, RunNamed(1), 2).empty());
}

TEST(PlacementTest, TheFirstReplicaIsTheOnlyHomeOfOneReplica) {
  const std::vector<PlacementNode> nodes = Nodes(7);
  for (int run = 0; run < 500; ++run) {
    EXPECT_EQ(HomesOf(nodes, RunNamed(run), 3).at(0), HomesOf(nodes, RunNamed(run), 1).at(0));
  }
}

// Every node of every version must place alike: these were computed by
// another implementation and stay.
TEST(PlacementTest, PlacesAsEver) {
  const std::vector<PlacementNode> nodes = Nodes(1000);
  std::string homes;
  for (int run = 0; run < 4; ++run) homes += HomeOf(nodes, run) + " ";
  EXPECT_EQ(homes, "node-320 node-290 node-559 node-374 ");
}

}  // namespace
}  // namespace crumb
