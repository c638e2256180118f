// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "server/keyspaces/keyspace_merge.h"

#include <gtest/gtest.h>

#include <random>

#include "common/sha256.h"
#include "server/cluster/node_check.h"

namespace crumb::server {
namespace {

PageKey Key(int number) {
  PageKey key;
  key.bytes = Sha256("page " + std::to_string(number));
  return key;
}

v1::KeyspaceRecord Fresh() {
  v1::KeyspaceRecord record;
  record.set_generation(1);
  record.set_state(v1::KEYSPACE_STATE_ACTIVE);
  return record;
}

TEST(KeyspaceMergeTest, TheGenerationOnlyRises) {
  v1::KeyspaceRecord ours = Fresh(), theirs = Fresh();
  theirs.set_generation(4);
  EXPECT_TRUE(MergeKeyspace(ours, theirs).generation);
  EXPECT_EQ(ours.generation(), 4u);
  theirs.set_generation(2);
  const KeyspaceChanges changes = MergeKeyspace(ours, theirs);
  EXPECT_FALSE(changes.any);
  EXPECT_TRUE(changes.theirs_behind);
  EXPECT_EQ(ours.generation(), 4u);
}

TEST(KeyspaceMergeTest, TheNewerStateCounts) {
  v1::KeyspaceRecord ours = Fresh(), theirs = Fresh();
  theirs.set_state(v1::KEYSPACE_STATE_BF16);
  theirs.set_state_version(2);
  theirs.set_state_who("another operator");
  EXPECT_TRUE(MergeKeyspace(ours, theirs).state);
  EXPECT_EQ(ours.state_who(), "another operator");
  theirs.set_state(v1::KEYSPACE_STATE_ACTIVE);
  theirs.set_state_version(1);
  EXPECT_FALSE(MergeKeyspace(ours, theirs).any);
}

TEST(KeyspaceMergeTest, DeletionsAreReceivedOnceEach) {
  v1::KeyspaceRecord ours = Fresh(), theirs = Fresh();
  AddDeletion(theirs, "a", {Key(1), Key(2)}, 100);
  EXPECT_EQ(MergeKeyspace(ours, theirs).deleted, (std::vector<PageKey>{Key(1), Key(2)}));
  EXPECT_TRUE(MergeKeyspace(ours, theirs).deleted.empty());
  AddDeletion(theirs, "a", {Key(3)}, 100);
  EXPECT_EQ(MergeKeyspace(ours, theirs).deleted, std::vector<PageKey>{Key(3)});
}

TEST(KeyspaceMergeTest, ANodeThatMissedForgottenDeletionsDeletesAll) {
  v1::KeyspaceRecord away = Fresh(), there = Fresh(), theirs = Fresh();
  for (int i = 0; i < 6; ++i) {
    AddDeletion(theirs, "a", {Key(i)}, 3);
    EXPECT_FALSE(MergeKeyspace(there, theirs).all_deleted);  // it learned of every one
  }
  EXPECT_EQ(theirs.deletions_size(), 3);
  EXPECT_TRUE(MergeKeyspace(away, theirs).all_deleted);
  EXPECT_FALSE(MergeKeyspace(away, theirs).all_deleted);
}

// Whatever happens where and in whatever order nodes learn of it, they end alike, and none misses a
// deletion.
TEST(KeyspaceMergeTest, NodesAgreeInTheEnd) {
  std::mt19937 random(17);
  for (int round = 0; round < 50; ++round) {
    constexpr int kNodes = 4;
    std::vector<v1::KeyspaceRecord> nodes(kNodes, Fresh());
    std::vector<std::vector<bool>> received(kNodes, std::vector<bool>(64, false));
    const auto merge = [&](int to, int from) {
      const KeyspaceChanges changes =
          MergeKeyspace(nodes[static_cast<size_t>(to)], nodes[static_cast<size_t>(from)]);
      auto& known = received[static_cast<size_t>(to)];
      for (int key = 0; key < 64; ++key) {
        const bool named = std::find(changes.deleted.begin(), changes.deleted.end(), Key(key)) !=
                           changes.deleted.end();
        if (named || changes.all_deleted) known[static_cast<size_t>(key)] = true;
      }
    };
    int next_key = 0;
    for (int step = 0; step < 60; ++step) {
      const int node = static_cast<int>(random() % kNodes);
      v1::KeyspaceRecord& record = nodes[static_cast<size_t>(node)];
      switch (random() % 4) {
        case 0:
          record.set_generation(record.generation() + 1);
          break;
        case 1:
          record.set_state(random() % 2 == 0 ? v1::KEYSPACE_STATE_BF16 : v1::KEYSPACE_STATE_ACTIVE);
          record.set_state_version(record.state_version() + 1);
          record.set_state_who(std::to_string(node));
          break;
        case 2:
          if (next_key < 64) {
            received[static_cast<size_t>(node)][static_cast<size_t>(next_key)] = true;
            AddDeletion(record, "node-" + std::to_string(node), {Key(next_key++)}, 4);
          }
          break;
        default:
          merge(node, static_cast<int>(random() % kNodes));
      }
    }
    for (int pass = 0; pass < 2; ++pass) {
      for (int to = 0; to < kNodes; ++to) {
        for (int from = 0; from < kNodes; ++from) merge(to, from);
      }
    }
    for (int node = 1; node < kNodes; ++node) {
      const auto& record = nodes[static_cast<size_t>(node)];
      EXPECT_EQ(record.generation(), nodes[0].generation());
      EXPECT_EQ(record.state(), nodes[0].state());
      EXPECT_EQ(record.state_who(), nodes[0].state_who());
      EXPECT_EQ(record.deletions_size(), nodes[0].deletions_size());
    }
    for (int node = 0; node < kNodes; ++node) {
      for (int key = 0; key < next_key; ++key) {
        EXPECT_TRUE(received[static_cast<size_t>(node)][static_cast<size_t>(key)])
            << "round " << round << " node " << node << " key " << key;
      }
    }
  }
}

v1::NodeRecord Record(const std::string& id) {
  v1::NodeRecord record;
  record.set_id(id);
  record.set_weight(1);
  record.set_grpc_address(id + ":1");
  record.set_wire_min(1);
  record.set_wire_max(2);
  record.set_layout_id(1);
  record.set_incarnation("life of " + id);
  record.set_cluster("crumb");
  return record;
}

TEST(NodeCheckTest, NamesWhyANodeCannotTakePart) {
  const v1::NodeRecord self = Record("self");
  const auto why = [&](const std::function<void(v1::NodeRecord&)>& change) {
    v1::NodeRecord other = Record("other");
    change(other);
    return std::string(CheckNode(self, other).message());
  };
  EXPECT_EQ(why([](auto&) {}), "");
  // Rolling upgrades: a version in common is enough.
  EXPECT_EQ(why([](auto& other) { other.set_wire_min(2), other.set_wire_max(3); }), "");
  EXPECT_NE(why([](auto& other) {
              other.set_wire_min(3), other.set_wire_max(4);
            }).find("wire versions 3 to 4"),
            std::string::npos);
  EXPECT_NE(why([](auto& other) { other.set_layout_id(2); }).find("layout 2"), std::string::npos);
  EXPECT_NE(why([](auto& other) { other.set_cluster("x"); }).find("cluster 'x'"),
            std::string::npos);
  EXPECT_NE(why([](auto& other) { other.set_id("self"); }).find("this node's id"),
            std::string::npos);
  EXPECT_NE(why([](auto& other) { other.set_weight(-1); }).find("weight"), std::string::npos);
}

TEST(NodeCheckTest, OfTwoNodesWithOneIdTheSecondIsLeftOutAndTheRestUnharmed) {
  v1::NodeRecord twin = Record("a");
  twin.set_grpc_address("elsewhere:1");
  twin.set_incarnation("another");
  v1::NodeRecord old = Record("c");
  old.set_wire_min(7);
  old.set_wire_max(7);
  std::vector<std::string> refused;
  const auto usable =
      UsableNodes(Record("self"), {Record("a"), twin, Record("b"), old, Record("self")}, &refused);
  ASSERT_EQ(usable.size(), 2u);
  EXPECT_EQ(usable[0].grpc_address(), "a:1");
  EXPECT_EQ(usable[1].id(), "b");
  EXPECT_EQ(refused.size(), 2u);
}

}  // namespace
}  // namespace crumb::server
