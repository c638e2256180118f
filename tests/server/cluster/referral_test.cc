// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
// Crumbds of one process whose homes keep no copies (cluster.push: reused): readers are referred to
// the nodes that have pages, and a node that leaves, restarts or dies costs only the pages that it
// alone held.
#include <algorithm>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/common/eventually.h"
#include "tests/server/cluster/test_nodes.h"

namespace crumb::server {
namespace {

using testing::Each;

constexpr int kPages = 40;

TestNodes::Settings Reused(bool ucx = true, int64_t replicas = 1) {
  TestNodes::Settings settings;
  settings.ucx = ucx;
  settings.change = [replicas](int, Options& options) {
    options.cluster.push = "reused";
    options.cluster.replicas = replicas;
  };
  return settings;
}

std::vector<TestSequence> Sequences(int first, int count) {
  std::vector<TestSequence> sequences;
  for (int i = 0; i < count; ++i) sequences.emplace_back(first + i, kPages);
  return sequences;
}

// Commits at a node and waits until every home has learned of it.
void Commit(TestNodes& nodes, int node, const std::vector<TestSequence>& sequences) {
  auto writer = nodes.Connect(node);
  for (const TestSequence& sequence : sequences) EXPECT_EQ(sequence.Commit(*writer), kPages);
  EXPECT_TRUE(Eventually([&] {
    return SeriesOf(nodes.daemon(node).endpoints().admin, "crumb_push_queue_pages") == 0;
  }));
}

double Sum(TestNodes& nodes, const std::string& series) {
  double sum = 0;
  for (int node = 0; node < nodes.count(); ++node) {
    if (nodes.running(node)) sum += SeriesOf(nodes.daemon(node).endpoints().admin, series);
  }
  return sum;
}

int Hits(TestClient& reader, const std::vector<TestSequence>& sequences) {
  int hits = 0;
  for (const TestSequence& sequence : sequences) {
    const int right = sequence.Read(reader);
    EXPECT_GE(right, 0) << "a wrong byte";
    hits += right;
  }
  return hits;
}

class ReferralPlanesTest : public testing::TestWithParam<bool> {};

INSTANTIATE_TEST_SUITE_P(Planes, ReferralPlanesTest, testing::Bool(),
                         [](const auto& plane) { return plane.param ? "Ucx" : "Grpc"; });

TEST_P(ReferralPlanesTest, PagesAreReadWhereTheyAreAndNotCopiedToTheirHomes) {
  TestNodes nodes(Reused(GetParam()));
  ASSERT_TRUE(nodes.WaitForView(3));
  const std::vector<TestSequence> sequences = Sequences(0, 8);
  Commit(nodes, 0, sequences);
  EXPECT_EQ(Sum(nodes, "crumb_received_pages_total"), 0);
  EXPECT_GT(Sum(nodes, "crumb_noted_pages_total"), 0);
  EXPECT_EQ(Sum(nodes, "crumb_directory_pages"), Sum(nodes, "crumb_noted_pages_total"));
  for (int node = 1; node < 3; ++node) {
    auto reader = nodes.Connect(node);
    for (const TestSequence& sequence : sequences) {
      std::vector<v1::Tier> tiers;
      EXPECT_EQ(sequence.Read(*reader, &tiers), kPages) << "node " << node;
      EXPECT_THAT(tiers, Each(v1::TIER_REMOTE));
      EXPECT_EQ(sequence.Read(*reader, &tiers), kPages);
      EXPECT_THAT(tiers, Each(v1::TIER_HOST));
    }
  }
  EXPECT_GT(Sum(nodes, "crumb_referred_runs_total"), 0);
  EXPECT_EQ(Sum(nodes, "crumb_pulled_pages_total"), 2 * 8 * kPages);
  EXPECT_EQ(Sum(nodes, "crumb_received_pages_total"), 0);
}

TEST(ReferralNodesTest, AReaderKeepsPagesAliveWhenTheirWriterDies) {
  TestNodes nodes(Reused());
  ASSERT_TRUE(nodes.WaitForView(3));
  const std::vector<TestSequence> sequences = Sequences(20, 8);
  Commit(nodes, 0, sequences);
  auto reader = nodes.Connect(1);
  EXPECT_EQ(Hits(*reader, sequences), 8 * kPages);
  nodes.Stop(0);  // the writer, and home of a third
  ASSERT_TRUE(nodes.WaitForView(2));
  // Runs of which it was the home have another one, which the reader names.
  auto other = nodes.Connect(2);
  EXPECT_TRUE(Eventually([&] { return Hits(*other, sequences) == 8 * kPages; }));
}

TEST(ReferralNodesTest, AHomeThatRestartsLearnsOfPagesAgain) {
  TestNodes nodes(Reused());
  ASSERT_TRUE(nodes.WaitForView(3));
  const std::vector<TestSequence> sequences = Sequences(40, 8);
  Commit(nodes, 0, sequences);
  const auto known = [&] {
    return SeriesOf(nodes.daemon(1).endpoints().admin, "crumb_directory_pages");
  };
  const double before = known();
  ASSERT_GT(before, 0);
  nodes.Stop(1);
  ASSERT_TRUE(nodes.WaitForView(2));
  nodes.Start(1);
  ASSERT_TRUE(nodes.WaitForView(3));
  EXPECT_TRUE(Eventually([&] { return known() >= before; })) << known() << " of " << before;
  auto reader = nodes.Connect(2);
  EXPECT_EQ(Hits(*reader, sequences), 8 * kPages);
}

TEST(ReferralNodesTest, ANodeThatRestartsOffersWhatItHasOnItsSsd) {
  TestNodes nodes(Reused());
  ASSERT_TRUE(nodes.WaitForView(3));
  const std::vector<TestSequence> sequences = Sequences(60, 8);
  Commit(nodes, 0, sequences);
  nodes.Stop(0);
  ASSERT_TRUE(nodes.WaitForView(2));
  auto reader = nodes.Connect(1);
  EXPECT_EQ(Hits(*reader, sequences), 0);
  nodes.Start(0);
  ASSERT_TRUE(nodes.WaitForView(3));
  EXPECT_TRUE(Eventually([&] { return Hits(*reader, sequences) == 8 * kPages; }));
}

TEST(ReferralNodesTest, ADrainedNodeLeavesCopiesOfAllItHas) {
  TestNodes nodes(Reused());
  ASSERT_TRUE(nodes.WaitForView(3));
  const std::vector<TestSequence> sequences = Sequences(80, 8);
  Commit(nodes, 0, sequences);
  auto other = nodes.Connect(1);
  v1::DrainNodeRequest drain;
  drain.set_node(nodes.IdOf(0));
  v1::DrainNodeResponse none;
  ASSERT_TRUE(other->stub().DrainNode(other->Context().get(), drain, &none).ok());
  ASSERT_TRUE(Eventually([&] {
    const v1::ListNodesResponse list = nodes.ListNodes(1);
    return std::any_of(list.nodes().begin(), list.nodes().end(), [&](const auto& node) {
      return node.id() == drain.node() && node.state() == "drained";
    });
  }));
  // Pages in both tiers are offered twice, and some fetched twice before they are found.
  EXPECT_GE(Sum(nodes, "crumb_received_pages_total"), 8 * kPages);
  nodes.Stop(0);
  ASSERT_TRUE(nodes.WaitForView(2));
  EXPECT_EQ(Hits(*other, sequences), 8 * kPages);
}

TEST(ReferralNodesTest, TwoReplicasStillMeanThatOneDeathCostsNothing) {
  TestNodes nodes(Reused(true, 2));
  ASSERT_TRUE(nodes.WaitForView(3));
  const std::vector<TestSequence> sequences = Sequences(100, 8);
  Commit(nodes, 0, sequences);
  EXPECT_GT(Sum(nodes, "crumb_received_pages_total"), 0);
  nodes.Stop(0);
  ASSERT_TRUE(nodes.WaitForView(2));
  auto reader = nodes.Connect(1);
  EXPECT_EQ(Hits(*reader, sequences), 8 * kPages);
}

TEST(ReferralNodesTest, DeletedPagesAreReferredToNoMore) {
  TestNodes nodes(Reused());
  ASSERT_TRUE(nodes.WaitForView(3));
  const std::vector<TestSequence> sequences = Sequences(120, 4);
  Commit(nodes, 0, sequences);
  auto client = nodes.Connect(1);
  for (const TestSequence& sequence : sequences) {
    v1::DeleteRequest request;
    request.set_keyspace(client->keyspace().keyspace());
    request.set_keys(sequence.Keys());
    v1::DeleteResponse deleted;
    ASSERT_TRUE(client->stub().Delete(client->Context().get(), request, &deleted).ok());
  }
  EXPECT_TRUE(Eventually([&] { return Sum(nodes, "crumb_directory_pages") == 0; }));
  for (int node = 0; node < 3; ++node) {
    auto reader = nodes.Connect(node);
    EXPECT_TRUE(Eventually([&] { return Hits(*reader, sequences) == 0; })) << node;
  }
}

}  // namespace
}  // namespace crumb::server
