// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
// Three crumbds of one process share pages, over UCX and over gRPC bytes.
#include "server/cluster/cluster.h"

#include <algorithm>
#include <filesystem>
#include <set>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/cluster/etcd/etcd_client.h"
#include "tests/common/eventually.h"
#include "tests/server/cluster/etcd_process.h"
#include "tests/server/cluster/test_nodes.h"

namespace crumb::server {
namespace {

using testing::Each;
using testing::ElementsAre;
using testing::HasSubstr;

class ClusterTest : public testing::TestWithParam<bool> {
 protected:
  TestNodes::Settings Settings() const {
    TestNodes::Settings settings;
    settings.ucx = GetParam();
    return settings;
  }
};

INSTANTIATE_TEST_SUITE_P(Planes, ClusterTest, testing::Bool(),
                         [](const auto& plane) { return plane.param ? "Ucx" : "Grpc"; });

TEST_P(ClusterTest, APageCommittedOnOneNodeIsHitOnAnother) {
  TestNodes nodes(Settings());
  ASSERT_TRUE(nodes.WaitForView(3));
  // Enough sequences that each node is home of some.
  std::vector<TestSequence> sequences;
  for (int i = 0; i < 8; ++i) sequences.emplace_back(i, 40);
  auto writer = nodes.Connect(0);
  for (const TestSequence& sequence : sequences) EXPECT_EQ(sequence.Commit(*writer), 40);
  EXPECT_TRUE(Eventually([&] {
    const std::string admin = nodes.daemon(0).endpoints().admin;
    return SeriesOf(admin, "crumb_push_queue_pages") == 0;
  }));
  int remote = 0;
  for (int node = 1; node < 3; ++node) {
    auto reader = nodes.Connect(node);
    for (const TestSequence& sequence : sequences) {
      std::vector<v1::Tier> tiers;
      EXPECT_EQ(sequence.Read(*reader, &tiers), 40) << "node " << node;
      remote += static_cast<int>(std::count(tiers.begin(), tiers.end(), v1::TIER_REMOTE));
      // The pages that came are here now.
      EXPECT_EQ(sequence.Read(*reader, &tiers), 40);
      EXPECT_THAT(tiers, Each(v1::TIER_HOST));
    }
  }
  // Two of three nodes lacked a third of the pages, and the writer lacked some.
  EXPECT_GT(remote, 40);
}

// Waits until nothing is left to push.
bool Pushed(TestNodes& nodes, int node) {
  return Eventually([&] {
    return SeriesOf(nodes.daemon(node).endpoints().admin, "crumb_push_queue_pages") == 0;
  });
}

TEST(ClusterConnectTest, NodesOfTheViewAreConnectedToBeforeTheyAreNeeded) {
  for (const int ahead : {0, 64}) {
    TestNodes::Settings settings;
    settings.change = [ahead](int, Options& options) { options.cluster.connect_ahead = ahead; };
    TestNodes nodes(settings);
    ASSERT_TRUE(nodes.WaitForView(3));
    const auto opened = [&](int node) {
      return SeriesOf(nodes.daemon(node).endpoints().admin,
                      "crumb_transport_connections_opened_total");
    };
    // Each opens one to both others, and each has an end that was accepted.
    const double wanted = ahead == 0 ? 0 : 12;
    EXPECT_TRUE(Eventually([&] { return opened(0) + opened(1) + opened(2) == wanted; }))
        << ahead << ": " << opened(0) + opened(1) + opened(2);
  }
}

TEST(ClusterMissTest, AMissEverywhereIsAMissAndEndsBeforeTheDeadline) {
  TestNodes nodes({});
  ASSERT_TRUE(nodes.WaitForView(3));
  auto client = nodes.Connect(0);
  v1::MissReason reason = v1::MISS_REASON_UNSPECIFIED;
  EXPECT_EQ(TestSequence(99, 200).Read(*client, nullptr, &reason), 0);
  EXPECT_EQ(reason, v1::MISS_REASON_ABSENT);
}

TEST(ClusterKillTest, ADeadNodeCostsItsShareOnlyAndTheRestGoesOn) {
  TestNodes nodes({});
  ASSERT_TRUE(nodes.WaitForView(3));
  std::vector<TestSequence> sequences;
  for (int i = 0; i < 24; ++i) sequences.emplace_back(i, 8);
  {
    auto writer = nodes.Connect(0);
    for (const TestSequence& sequence : sequences) sequence.Commit(*writer);
    ASSERT_TRUE(Pushed(nodes, 0));
  }
  const std::string dead = nodes.IdOf(0);
  nodes.Stop(0);  // the writer, and home of a third
  ASSERT_TRUE(nodes.WaitForView(2));
  auto reader = nodes.Connect(1);
  int hits = 0;
  for (const TestSequence& sequence : sequences) {
    const int right = sequence.Read(*reader);
    ASSERT_GE(right, 0);
    if (right == 8) ++hits;
  }
  // 24 runs over three equal homes: each has some, with a chance of 1 in 5,000 otherwise.
  EXPECT_GE(hits, 8);
  EXPECT_LT(hits, 24);
  // It comes back warm: the pages on its SSD count again.
  nodes.Start(0);
  EXPECT_EQ(nodes.IdOf(0), dead);
  ASSERT_TRUE(nodes.WaitForView(3));
  EXPECT_TRUE(Eventually([&] {
    int again = 0;
    for (const TestSequence& sequence : sequences) again += sequence.Read(*reader) == 8;
    return again == 24;
  }));
}

TEST(ClusterDropTest, WhatWasDroppedStaysDroppedOnANodeThatWasAway) {
  TestNodes nodes({});
  ASSERT_TRUE(nodes.WaitForView(3));
  const TestSequence sequence(5, 40);
  {
    auto writer = nodes.Connect(2);
    ASSERT_EQ(sequence.Commit(*writer), 40);
    ASSERT_TRUE(Pushed(nodes, 2));
  }
  nodes.Stop(2);
  {
    auto other = nodes.Connect(0);
    v1::DropKeyspaceRequest drop;
    drop.set_keyspace(other->keyspace().keyspace());
    v1::DropKeyspaceResponse dropped;
    ASSERT_TRUE(other->stub().DropKeyspace(other->Context().get(), drop, &dropped).ok());
    EXPECT_EQ(dropped.generation(), 2u);
  }
  nodes.Start(2);  // its SSD has the pages
  for (int node = 0; node < 3; ++node) {
    EXPECT_TRUE(Eventually([&] {
      auto client = nodes.Connect(node);
      return client->keyspace().generation() == 2;
    })) << node;
    auto client = nodes.Connect(node);
    EXPECT_EQ(sequence.Read(*client), 0) << node;
  }
}

TEST(ClusterDropTest, ADeletedPageStaysDeletedOnANodeThatWasAway) {
  TestNodes nodes({});
  ASSERT_TRUE(nodes.WaitForView(3));
  const TestSequence sequence(6, 4);
  {
    auto writer = nodes.Connect(2);
    ASSERT_EQ(sequence.Commit(*writer), 4);
    ASSERT_TRUE(Pushed(nodes, 2));
  }
  nodes.Stop(2);
  auto other = nodes.Connect(0);
  v1::DeleteRequest request;
  request.set_keyspace(other->keyspace().keyspace());
  request.set_keys(sequence.Keys());
  v1::DeleteResponse deleted;
  ASSERT_TRUE(other->stub().Delete(other->Context().get(), request, &deleted).ok());
  nodes.Start(2);
  for (int node = 0; node < 3; ++node) {
    EXPECT_TRUE(Eventually([&] {
      auto client = nodes.Connect(node);
      return sequence.Read(*client) == 0;
    })) << node;
  }
}

TEST(ClusterDrainTest, ADrainedNodeLeavesItsPagesToTheOthers) {
  TestNodes nodes({});
  ASSERT_TRUE(nodes.WaitForView(3));
  std::vector<TestSequence> sequences;
  for (int i = 0; i < 12; ++i) sequences.emplace_back(100 + i, 36);
  {
    auto writer = nodes.Connect(0);
    for (const TestSequence& sequence : sequences) sequence.Commit(*writer);
    ASSERT_TRUE(Pushed(nodes, 0));
  }
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
  nodes.Stop(0);
  ASSERT_TRUE(nodes.WaitForView(2));
  for (const TestSequence& sequence : sequences) EXPECT_EQ(sequence.Read(*other), 36);
}

TEST(ClusterIdentityTest, TwoNodesWithOneIdAreNamedAndTheRestIsUnharmed) {
  TestNodes::Settings settings;
  settings.count = 4;
  settings.change = [](int node, Options& options) {
    options.log.severity = "off";
    if (node == 3) options.cluster.name = "another";
  };
  TestNodes nodes(settings);
  EXPECT_TRUE(Eventually([&] {
    const v1::ListNodesResponse list = nodes.ListNodes(0);
    return list.nodes_size() == 3 && list.refused_size() == 1;
  }));
  EXPECT_THAT(nodes.ListNodes(0).refused(0), HasSubstr("cluster 'another'"));
  // A copy of node 1's data folder under node 2's address.
  nodes.Stop(2);
  nodes.Stop(1);
  std::filesystem::remove_all(nodes.options(2).store.ssd.path);
  std::filesystem::copy(nodes.options(1).store.ssd.path, nodes.options(2).store.ssd.path,
                        std::filesystem::copy_options::recursive);
  nodes.Start(1);
  nodes.Start(2);
  EXPECT_TRUE(Eventually([&] {
    const v1::ListNodesResponse list = nodes.ListNodes(0);
    return std::any_of(list.refused().begin(), list.refused().end(),
                       [](const auto& why) { return why.find("one id") != std::string::npos; });
  }));
  const TestSequence sequence(7, 8);
  auto writer = nodes.Connect(0);
  EXPECT_EQ(sequence.Commit(*writer), 8);
  EXPECT_EQ(sequence.Read(*writer), 8);
}

// The nodes that a page's run belongs to, once all of them hold it.
bool HeldAtHome(TestClient& client, const PageKey& key) {
  v1::LocatePageRequest request;
  request.set_key(std::string(key.view()));
  v1::LocatePageResponse place;
  if (!client.stub().LocatePage(client.Context().get(), request, &place).ok()) return false;
  const std::set<std::string> holders(place.holders().begin(), place.holders().end());
  return place.homes_size() > 0 &&
         std::all_of(place.homes().begin(), place.homes().end(),
                     [&](const auto& id) { return holders.contains(id); });
}

TEST(ClusterAloneTest, WhatWasCommittedBeforeAnyOtherNodeWasThereGoesToItsHome) {
  TestNodes::Settings settings;
  settings.count = 2;
  TestNodes nodes(settings);
  ASSERT_TRUE(nodes.WaitForView(2));
  nodes.Stop(1);
  ASSERT_TRUE(nodes.WaitForView(1));
  auto writer = nodes.Connect(0);
  std::vector<TestSequence> sequences;
  for (int i = 0; i < 12; ++i) sequences.emplace_back(400 + i, 4);
  for (const TestSequence& sequence : sequences) ASSERT_EQ(sequence.Commit(*writer), 4);
  nodes.Start(1);
  ASSERT_TRUE(nodes.WaitForView(2));
  for (const TestSequence& sequence : sequences) {
    for (int page = 0; page < 4; ++page) {
      EXPECT_TRUE(Eventually([&] { return HeldAtHome(*writer, sequence.Key(page)); }));
    }
  }
  // Some of the runs are the other node's.
  EXPECT_GT(SeriesOf(nodes.daemon(1).endpoints().admin, "crumb_received_pages_total"), 0);
}

TEST(ClusterLocateTest, SaysWhereAPageBelongsAndWhoHasIt) {
  TestNodes nodes({});
  ASSERT_TRUE(nodes.WaitForView(3));
  const TestSequence sequence(8, 40);
  auto writer = nodes.Connect(0);
  sequence.Commit(*writer);
  ASSERT_TRUE(Pushed(nodes, 0));
  v1::LocatePageRequest request;
  request.set_key(std::string(sequence.Key(35).view()));
  v1::LocatePageResponse place;
  ASSERT_TRUE(writer->stub().LocatePage(writer->Context().get(), request, &place).ok());
  EXPECT_EQ(place.run(), std::string(sequence.Key(32).view()));
  ASSERT_EQ(place.homes_size(), 1);
  std::set<std::string> holders(place.holders().begin(), place.holders().end());
  EXPECT_TRUE(holders.contains(place.homes(0)));
  EXPECT_TRUE(holders.contains(nodes.IdOf(0)));
  EXPECT_EQ(place.silent_size(), 0);
}

TEST(ClusterWatchTest, ARouterThatComesBackGetsASnapshotAndThenWhatChanges) {
  TestNodes nodes({});
  ASSERT_TRUE(nodes.WaitForView(3));
  auto writer = nodes.Connect(0);
  const TestSequence before(9, 3), after(10, 2);
  before.Commit(*writer);
  // The second router of the two is a restart of the first.
  for (int life = 0; life < 2; ++life) {
    v1::WatchEventsRequest request;
    request.set_keyspace(writer->keyspace().keyspace());
    request.set_snapshot(true);
    auto context = writer->Context();
    auto stream = writer->stub().WatchEvents(context.get(), request);
    std::set<std::string> pages;
    v1::WatchEventsResponse event;
    uint64_t sequence = 0;
    while (stream->Read(&event) && event.kind() != v1::WatchEventsResponse::KIND_SNAPSHOT_END) {
      EXPECT_EQ(event.kind(), v1::WatchEventsResponse::KIND_ADDED);
      pages.insert(event.key());
    }
    EXPECT_EQ(pages.size(), life == 0 ? 3u : 5u);
    sequence = event.sequence();
    if (life == 0) {
      after.Commit(*writer);
      while (pages.size() < 5 && stream->Read(&event)) {
        EXPECT_GT(event.sequence(), sequence);
        sequence = event.sequence();
        if (event.kind() == v1::WatchEventsResponse::KIND_ADDED) pages.insert(event.key());
      }
    }
    context->TryCancel();
  }
}

class EtcdClusterTest : public testing::Test {
 protected:
  void SetUp() override {
    ASSERT_TRUE(EtcdProcess::Installed()) << "install the package etcd-server";
    ASSERT_TRUE(etcd_.Start());
  }
  TestNodes::Settings Settings() const {
    TestNodes::Settings settings;
    settings.etcd = {etcd_.endpoint()};
    settings.node_ttl = std::chrono::seconds(2);
    return settings;
  }
  EtcdProcess etcd_;
};

TEST_F(EtcdClusterTest, NodesMeetShareAndLeave) {
  TestNodes nodes(Settings());
  ASSERT_TRUE(nodes.WaitForView(3));
  std::vector<TestSequence> sequences;
  for (int i = 0; i < 6; ++i) sequences.emplace_back(200 + i, 33);
  auto writer = nodes.Connect(0);
  for (const TestSequence& sequence : sequences) sequence.Commit(*writer);
  ASSERT_TRUE(Pushed(nodes, 0));
  auto reader = nodes.Connect(1);
  for (const TestSequence& sequence : sequences) EXPECT_EQ(sequence.Read(*reader), 33);
  nodes.Stop(2);
  EXPECT_TRUE(nodes.WaitForView(2));
}

TEST_F(EtcdClusterTest, WithoutEtcdTheLastViewStaysInForce) {
  TestNodes nodes(Settings());
  ASSERT_TRUE(nodes.WaitForView(3));
  etcd_.Stop();
  const TestSequence sequence(300, 40);
  auto writer = nodes.Connect(0);
  auto reader = nodes.Connect(1);
  EXPECT_EQ(sequence.Commit(*writer), 40);
  ASSERT_TRUE(Pushed(nodes, 0));
  // Longer than every lease.
  const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(3);
  while (std::chrono::steady_clock::now() < until) {
    EXPECT_GE(sequence.Read(*reader), 0);
    EXPECT_EQ(nodes.ListNodes(1).nodes_size(), 3);
  }
  EXPECT_GT(SeriesOf(nodes.daemon(0).endpoints().admin, "crumb_etcd_failures_total"), 0);
  ASSERT_TRUE(etcd_.Start());
  EXPECT_TRUE(nodes.WaitForView(3));
}

// The longest of some reads, in seconds.
double SlowestRead(TestClient& reader, const TestSequence& sequence, int reads) {
  double slowest = 0;
  for (int i = 0; i < reads; ++i) {
    const auto began = std::chrono::steady_clock::now();
    EXPECT_EQ(sequence.Read(reader), sequence.pages());
    slowest = std::max(
        slowest, std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count());
  }
  return slowest;
}

TEST_F(EtcdClusterTest, AFrozenEtcdIsReportedAndNoNodeLeavesWhenItGoesOn) {
  TestNodes nodes(Settings());
  ASSERT_TRUE(nodes.WaitForView(3));
  const std::string admin = nodes.daemon(1).endpoints().admin;
  ASSERT_TRUE(Eventually([&] { return SeriesOf(admin, "crumb_view_nodes") == 3; }));
  const double views = SeriesOf(admin, "crumb_view_changes_total");
  EXPECT_EQ(SeriesOf(admin, "crumb_etcd_state{state=\"ok\"}"), 1);
  EXPECT_EQ(nodes.ListNodes(1).trouble(), "");
  etcd_.Freeze();
  const auto frozen = std::chrono::steady_clock::now();
  EXPECT_TRUE(
      Eventually([&] { return SeriesOf(admin, "crumb_etcd_state{state=\"silent\"}") == 1; }));
  EXPECT_THAT(nodes.ListNodes(1).trouble(), HasSubstr("etcd does not respond"));
  const TestSequence sequence(310, 40);
  auto writer = nodes.Connect(0);
  auto reader = nodes.Connect(1);
  EXPECT_EQ(sequence.Commit(*writer), 40);
  ASSERT_TRUE(Pushed(nodes, 0));
  // Requests know nothing of it: a call to etcd would take its deadline, 500 ms, at least.
  EXPECT_LT(SlowestRead(*reader, sequence, 20), 20);
  // Longer than every lease.
  EXPECT_TRUE(Eventually(
      [&] { return std::chrono::steady_clock::now() - frozen > std::chrono::seconds(4); }));
  EXPECT_EQ(nodes.ListNodes(1).nodes_size(), 3);
  etcd_.Thaw();
  for (int node = 0; node < 3; ++node) {
    const std::string other = nodes.daemon(node).endpoints().admin;
    EXPECT_TRUE(Eventually([&] {
      EXPECT_EQ(nodes.ListNodes(node).nodes_size(), 3);
      return SeriesOf(other, "crumb_etcd_state{state=\"ok\"}") == 1;
    })) << node;
  }
  EXPECT_EQ(nodes.ListNodes(1).trouble(), "");
  // etcd's events of leases that ended meanwhile have passed once a later change is seen.
  nodes.Stop(2);
  EXPECT_TRUE(Eventually([&] { return SeriesOf(admin, "crumb_view_nodes") == 2; }));
  EXPECT_EQ(SeriesOf(admin, "crumb_view_changes_total"), views + 1);
}

TEST_F(EtcdClusterTest, AnEtcdThatLostItsDataIsSentAllAgain) {
  TestNodes nodes(Settings());
  ASSERT_TRUE(nodes.WaitForView(3));
  {
    auto client = nodes.Connect(0);
    v1::DropKeyspaceRequest drop;
    drop.set_keyspace(client->keyspace().keyspace());
    v1::DropKeyspaceResponse dropped;
    ASSERT_TRUE(client->stub().DropKeyspace(client->Context().get(), drop, &dropped).ok());
    ASSERT_TRUE(Eventually([&] { return nodes.Connect(1)->keyspace().generation() == 2; }));
  }
  // So that the new one's revisions are lower for long; nodes read on from here.
  for (int i = 0; i < 50; ++i) {
    ASSERT_TRUE(etcd_.Post("/v3/kv/put", R"({"key": "YQ==", "value": "YQ=="})"));
  }
  nodes.Stop(2);
  ASSERT_TRUE(nodes.WaitForView(2));
  nodes.Start(2);
  ASSERT_TRUE(nodes.WaitForView(3));
  etcd_.Stop();
  etcd_.Wipe();
  ASSERT_TRUE(etcd_.Start());
  const auto client = EtcdClient::Make({etcd_.endpoint()}, std::chrono::seconds(5));
  EXPECT_TRUE(Eventually([&] {
    int64_t revision = 0;
    const auto nodes_there = client->Range("/crumb/nodes/", &revision);
    const auto keyspaces = client->Range("/crumb/keyspaces/", &revision);
    return nodes_there.ok() && nodes_there->size() == 3 && keyspaces.ok() && keyspaces->size() == 1;
  }));
  // Views change with it again.
  nodes.Stop(2);
  EXPECT_TRUE(nodes.WaitForView(2));
  const std::string admin = nodes.daemon(0).endpoints().admin;
  EXPECT_TRUE(Eventually([&] { return SeriesOf(admin, "crumb_view_nodes") == 2; }));
}

TEST(EtcdFullTest, RegisteredNodesGoOnAndTheRestFollowsOnceThereIsRoom) {
  ASSERT_TRUE(EtcdProcess::Installed()) << "install the package etcd-server";
  EtcdProcess::Settings small;
  small.quota_bytes = 2 << 20;
  EtcdProcess etcd(small);
  ASSERT_TRUE(etcd.Start());
  TestNodes::Settings settings;
  settings.etcd = {etcd.endpoint()};
  settings.node_ttl = std::chrono::seconds(2);
  TestNodes nodes(settings);
  ASSERT_TRUE(nodes.WaitForView(3));
  const std::string admin = nodes.daemon(0).endpoints().admin;
  const TestSequence sequence(320, 4);
  {
    auto writer = nodes.Connect(0);
    ASSERT_EQ(sequence.Commit(*writer), 4);
    ASSERT_TRUE(Pushed(nodes, 0));
  }
  nodes.Stop(2);
  ASSERT_TRUE(Eventually([&] { return SeriesOf(admin, "crumb_view_nodes") == 2; }));
  const double views = SeriesOf(admin, "crumb_view_changes_total");
  ASSERT_TRUE(etcd.Fill());
  // Leases are renewed, so that nothing is noticed until there is something to write.
  {
    auto client = nodes.Connect(0);
    v1::DropKeyspaceRequest drop;
    drop.set_keyspace(client->keyspace().keyspace());
    v1::DropKeyspaceResponse dropped;
    ASSERT_TRUE(client->stub().DropKeyspace(client->Context().get(), drop, &dropped).ok());
    EXPECT_EQ(dropped.generation(), 2u);
  }
  EXPECT_TRUE(Eventually([&] { return SeriesOf(admin, "crumb_etcd_state{state=\"full\"}") == 1; }));
  EXPECT_THAT(nodes.ListNodes(0).trouble(), HasSubstr("disarm its alarm"));
  const auto full = std::chrono::steady_clock::now();
  // A node that comes meanwhile serves its own workers, and is not seen by the others.
  nodes.Start(2);
  {
    auto client = nodes.Connect(2);
    EXPECT_EQ(TestSequence(321, 4).Commit(*client), 4);
    EXPECT_EQ(TestSequence(321, 4).Read(*client), 4);
  }
  EXPECT_EQ(nodes.ListNodes(2).nodes_size(), 3);
  // Longer than leases last: pauses between tries must not let them end.
  EXPECT_TRUE(Eventually([&] {
    EXPECT_EQ(nodes.ListNodes(0).nodes_size(), 2);
    return std::chrono::steady_clock::now() - full > std::chrono::seconds(6);
  }));
  EXPECT_EQ(SeriesOf(admin, "crumb_view_changes_total"), views);
  ASSERT_TRUE(etcd.MakeRoom());
  EXPECT_TRUE(Eventually([&] { return SeriesOf(admin, "crumb_etcd_state{state=\"ok\"}") == 1; }));
  ASSERT_TRUE(nodes.WaitForView(3));
  EXPECT_EQ(nodes.ListNodes(0).trouble(), "");
  // The drop has arrived everywhere.
  EXPECT_TRUE(Eventually([&] { return nodes.Connect(2)->keyspace().generation() == 2; }));
}

TEST_F(EtcdClusterTest, AGenerationOutlivesEveryNodeThatKnewOfIt) {
  TestNodes nodes(Settings());
  ASSERT_TRUE(nodes.WaitForView(3));
  const TestSequence sequence(301, 4);
  {
    auto away = nodes.Connect(2);
    ASSERT_EQ(sequence.Commit(*away), 4);
    ASSERT_TRUE(Pushed(nodes, 2));
  }
  nodes.Stop(2);
  {
    auto other = nodes.Connect(0);
    v1::DropKeyspaceRequest drop;
    drop.set_keyspace(other->keyspace().keyspace());
    v1::DropKeyspaceResponse dropped;
    ASSERT_TRUE(other->stub().DropKeyspace(other->Context().get(), drop, &dropped).ok());
    ASSERT_TRUE(Eventually([&] { return nodes.Connect(1)->keyspace().generation() == 2; }));
  }
  nodes.Stop(0);
  nodes.Stop(1);
  nodes.Start(2);  // the node can learn it from etcd alone
  auto client = nodes.Connect(2);
  EXPECT_EQ(client->keyspace().generation(), 2u);
  EXPECT_EQ(sequence.Read(*client), 0);
}

}  // namespace
}  // namespace crumb::server
