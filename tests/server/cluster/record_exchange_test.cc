// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
// Drops reach the other nodes however many there are, and a node that could not learn of them
// says so and serves nothing.
#include <atomic>

#include "crumb/v1/peer_service.grpc.pb.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/cluster/protocol_versions.h"
#include "tests/common/eventually.h"
#include "tests/server/cluster/etcd_process.h"
#include "tests/server/cluster/test_nodes.h"

namespace crumb::server {
namespace {

using testing::HasSubstr;

// Opens a keyspace of `model` whose record has about `field_bytes` more.
std::string OpenLong(TestClient& client, const std::string& model, int field_bytes) {
  v1::OpenKeyspaceRequest request;
  (*request.mutable_fields())["model"] = model;
  for (int i = 0; i < field_bytes / 1000; ++i) {
    (*request.mutable_fields())["field" + std::to_string(i)] = std::string(1000, 'x');
  }
  request.set_layers(TestClient::kLayers);
  request.set_kv_heads(TestClient::kKvHeads);
  request.set_head_dim(TestClient::kHeadDim);
  request.set_group_size(TestClient::kGroupSize);
  v1::OpenKeyspaceResponse response;
  const grpc::Status status =
      client.stub().OpenKeyspace(client.Context().get(), request, &response);
  EXPECT_TRUE(status.ok()) << status.error_message();
  return response.keyspace();
}

void DeleteMany(TestClient& client, const std::string& keyspace, int keys) {
  v1::DeleteRequest request;
  request.set_keyspace(keyspace);
  request.set_keys(TestClient::Keys(0, keys));
  v1::DeleteResponse response;
  const grpc::Status status = client.stub().Delete(client.Context().get(), request, &response);
  EXPECT_TRUE(status.ok()) << status.error_message();
}

void Drop(TestClient& client) {
  v1::DropKeyspaceRequest request;
  request.set_keyspace(client.keyspace().keyspace());
  v1::DropKeyspaceResponse response;
  const grpc::Status status =
      client.stub().DropKeyspace(client.Context().get(), request, &response);
  EXPECT_TRUE(status.ok()) << status.error_message();
}

// Two nodes, the second of which holds a page; the first fills its records, then drops the page's
// keyspace.
void ExpectDropArrives(const TestNodes::Settings& settings,
                       const std::function<void(TestClient&)>& fill) {
  TestNodes nodes(settings);
  ASSERT_TRUE(nodes.WaitForView(2));
  const auto first = nodes.Connect(0);
  const auto second = nodes.Connect(1);
  const TestSequence sequence(1, 4);
  ASSERT_EQ(sequence.Commit(*second), 4);
  ASSERT_EQ(sequence.Read(*second), 4);
  fill(*first);
  Drop(*first);
  EXPECT_TRUE(Eventually([&] { return nodes.Connect(1)->keyspace().generation() == 2; }));
  EXPECT_EQ(sequence.Read(*second), 0);
  // A node that comes back receives all of it as well, before it serves.
  nodes.Stop(1);
  nodes.Start(1);
  const auto again = nodes.Connect(1);
  EXPECT_EQ(again->keyspace().generation(), 2u);
  EXPECT_EQ(sequence.Read(*again), 0);
  EXPECT_TRUE(Eventually(
      [&] { return SeriesOf(nodes.daemon(1).endpoints().admin, "crumb_pages_withheld") == 0; }));
  const TestSequence fresh(2, 4);
  EXPECT_EQ(fresh.Commit(*again), 4);
  EXPECT_EQ(fresh.Read(*again), 4);
}

TestNodes::Settings TwoNodes() {
  TestNodes::Settings settings;
  settings.count = 2;
  settings.ucx = false;
  return settings;
}

// The records have 4.9 MB together, more than one message carries.
void OpenManyLong(TestClient& client) {
  for (int i = 0; i < 81; ++i) OpenLong(client, "long-" + std::to_string(i), 60'000);
}
// Together 4.3 MB.
void DeleteInMany(TestClient& client) {
  for (int i = 0; i < 32; ++i) {
    DeleteMany(client, OpenLong(client, "deleted-" + std::to_string(i), 0), 4096);
  }
}

TEST(RecordExchangeTest, ADropArrivesBesideManyLongKeyspaces) {
  ExpectDropArrives(TwoNodes(), OpenManyLong);
}

TEST(RecordExchangeTest, ADropArrivesBesideManyDeletions) {
  ExpectDropArrives(TwoNodes(), DeleteInMany);
}

TEST(RecordExchangeTest, ADropArrivesByEtcdBesideManyLongRecords) {
  ASSERT_TRUE(EtcdProcess::Installed()) << "install the package etcd-server";
  EtcdProcess etcd;
  ASSERT_TRUE(etcd.Start());
  TestNodes::Settings settings = TwoNodes();
  settings.etcd = {etcd.endpoint()};
  settings.node_ttl = std::chrono::seconds(2);
  ExpectDropArrives(settings, [](TestClient& client) {
    OpenManyLong(client);
    DeleteInMany(client);
  });
}

TEST(RecordExchangeTest, ADropArrivesWhileEtcdIsAway) {
  ASSERT_TRUE(EtcdProcess::Installed()) << "install the package etcd-server";
  EtcdProcess etcd;
  ASSERT_TRUE(etcd.Start());
  TestNodes::Settings settings = TwoNodes();
  settings.etcd = {etcd.endpoint()};
  settings.node_ttl = std::chrono::seconds(2);
  TestNodes nodes(settings);
  ASSERT_TRUE(nodes.WaitForView(2));
  const auto first = nodes.Connect(0);
  const auto second = nodes.Connect(1);
  const TestSequence sequence(3, 4);
  ASSERT_EQ(sequence.Commit(*second), 4);
  etcd.Stop();
  Drop(*first);
  EXPECT_TRUE(Eventually([&] { return sequence.Read(*second) == 0; }));
}

// A node that responds to hellos, and to an exchange of records as the test says.
class ScriptedPeer final : public v1::PeerService::Service {
 public:
  ScriptedPeer() {
    self_.set_id("scripted");
    self_.set_weight(1);
    self_.set_wire_min(kWireMin);
    self_.set_wire_max(kWireMax);
    self_.set_layout_id(FragmentHeader().layout_id);
    self_.set_host("elsewhere");
    self_.set_state(v1::NODE_STATE_ACTIVE);
    self_.set_incarnation("a life");
    self_.set_cluster("crumb");
    const int port = FreePort();
    address_ = "127.0.0.1:" + std::to_string(port);
    self_.set_grpc_address(address_);
    grpc::ServerBuilder builder;
    builder.AddListeningPort(address_, grpc::InsecureServerCredentials());
    builder.RegisterService(this);
    server_ = builder.BuildAndStart();
  }

  grpc::Status PeerHello(grpc::ServerContext*, const v1::PeerHelloRequest*,
                         v1::PeerHelloResponse* response) override {
    *response->mutable_node() = self_;
    response->set_keyspaces_version(version.load());
    return grpc::Status::OK;
  }
  grpc::Status PeerKeyspaces(grpc::ServerContext*, const v1::PeerKeyspacesRequest* request,
                             v1::PeerKeyspacesResponse* response) override {
    ++exchanges;
    if (failing.load()) {
      return grpc::Status(grpc::StatusCode::RESOURCE_EXHAUSTED, "too long a message");
    }
    if (knows_pages && request->paged()) {
      response->set_paged(true);
      response->set_next(version.load());
      response->set_incarnation(self_.incarnation());
    }
    return grpc::Status::OK;
  }

  const std::string& address() const { return address_; }

  std::atomic<uint64_t> version{5};
  std::atomic<bool> failing{false};
  std::atomic<bool> knows_pages{true};
  std::atomic<int> exchanges{0};

 private:
  v1::NodeRecord self_;
  std::string address_;
  std::unique_ptr<grpc::Server> server_;
};

// One node whose list names `peer`, too.
TestNodes::Settings WithPeer(const std::string& peer, bool serve_unsynced = false) {
  TestNodes::Settings settings;
  settings.count = 1;
  settings.ucx = false;
  settings.change = [peer, serve_unsynced](int, Options& options) {
    options.log.severity = "off";
    options.cluster.nodes.push_back(peer);
    options.cluster.serve_unsynced = serve_unsynced;
    options.cluster.lookup_deadline = std::chrono::milliseconds(100);
  };
  return settings;
}

TEST(RecordExchangeTest, ANodeThatCouldNotLearnOfDropsSaysSoAndServesNothing) {
  for (const bool knows_pages : {true, false}) {
    ScriptedPeer peer;
    peer.knows_pages = knows_pages;
    TestNodes nodes(WithPeer(peer.address()));
    const std::string admin = nodes.daemon(0).endpoints().admin;
    const auto client = nodes.Connect(0);
    const TestSequence sequence(1, 4);
    ASSERT_EQ(sequence.Commit(*client), 4);
    EXPECT_EQ(sequence.Read(*client), 4);
    EXPECT_EQ(nodes.ListNodes(0).trouble(), "");
    // The peer has records that does not arrive.
    peer.failing = true;
    ++peer.version;
    v1::MissReason reason = v1::MISS_REASON_UNSPECIFIED;
    EXPECT_TRUE(Eventually([&] { return sequence.Read(*client, nullptr, &reason, 100) == 0; }));
    EXPECT_EQ(reason, v1::MISS_REASON_GENERATION);
    EXPECT_THAT(nodes.ListNodes(0).trouble(), HasSubstr("pages are withheld"));
    EXPECT_THAT(nodes.ListNodes(0).trouble(), HasSubstr("scripted"));
    EXPECT_EQ(SeriesOf(admin, "crumb_pages_withheld"), 1);
    EXPECT_EQ(SeriesOf(admin, "crumb_unsynced_nodes"), 1);
    EXPECT_GT(SeriesOf(admin, "crumb_record_exchange_failures_total"), 0);
    std::vector<std::vector<std::byte>> fragments;
    ASSERT_TRUE(client->Get(sequence.Keys(), &fragments, &reason).ok());
    EXPECT_TRUE(fragments.empty());
    // Pages are served again after it arrives.
    peer.failing = false;
    EXPECT_TRUE(Eventually([&] { return sequence.Read(*client, nullptr, nullptr, 100) == 4; }));
    EXPECT_EQ(nodes.ListNodes(0).trouble(), "");
    EXPECT_EQ(SeriesOf(admin, "crumb_pages_withheld"), 0);
  }
}

TEST(RecordExchangeTest, ADeadNodeMakesNothingWithheld) {
  auto peer = std::make_unique<ScriptedPeer>();
  TestNodes nodes(WithPeer(peer->address()));
  const auto client = nodes.Connect(0);
  const TestSequence sequence(1, 4);
  ASSERT_EQ(sequence.Commit(*client), 4);
  ++peer->version;
  peer.reset();
  ASSERT_TRUE(nodes.WaitForView(1));
  EXPECT_EQ(sequence.Read(*client), 4);
}

// One node that gets no response from another node or etcd. Its first run serves the pages that it
// stores; the next one withholds the keyspace that it recovers, and serves one that it opens.
void ExpectOnlyRecoveredIsWithheld(const TestNodes::Settings& settings, bool serve_unsynced) {
  TestNodes nodes(settings);
  const TestSequence stored(1, 4);
  {
    const auto client = nodes.Connect(0);
    ASSERT_EQ(stored.Commit(*client), 4);
    EXPECT_EQ(stored.Read(*client), 4) << "no drop can be younger than a page of this run";
    EXPECT_EQ(SeriesOf(nodes.daemon(0).endpoints().admin, "crumb_withheld_keyspaces"), 0);
    v1::FlushResponse flushed;
    ASSERT_TRUE(client->stub().Flush(client->Context().get(), {}, &flushed).ok());
  }
  nodes.Stop(0);
  nodes.Start(0);
  const auto client = nodes.Connect(0);
  if (serve_unsynced) {
    EXPECT_TRUE(Eventually([&] { return stored.Read(*client, nullptr, nullptr, 100) == 4; }));
    EXPECT_EQ(nodes.ListNodes(0).trouble(), "");
    return;
  }
  v1::MissReason reason = v1::MISS_REASON_UNSPECIFIED;
  EXPECT_EQ(stored.Read(*client, nullptr, &reason, 100), 0);
  EXPECT_EQ(reason, v1::MISS_REASON_GENERATION);
  EXPECT_TRUE(Eventually([&] {
    return nodes.ListNodes(0).trouble().find("cluster.serve_unsynced") != std::string::npos;
  }));
  EXPECT_EQ(stored.Read(*client, nullptr, nullptr, 100), 0);
  // A page of the recovered keyspace cannot be distinguished from an older one of the same key.
  const TestSequence since(2, 4);
  ASSERT_EQ(since.Commit(*client), 4);
  EXPECT_EQ(since.Read(*client, nullptr, nullptr, 100), 0);
  ASSERT_TRUE(client->OpenKeyspace("opened since the start").ok());
  ASSERT_EQ(since.Commit(*client), 4);
  EXPECT_EQ(since.Read(*client), 4);
  const std::string admin = nodes.daemon(0).endpoints().admin;
  EXPECT_EQ(SeriesOf(admin, "crumb_pages_withheld"), 1);
  EXPECT_EQ(SeriesOf(admin, "crumb_withheld_keyspaces"), 1);
}

TEST(RecordExchangeTest, ANodeThatLearnedOfNoOtherWithholdsWhatItRecovered) {
  const std::string silent = "127.0.0.1:" + std::to_string(FreePort());
  ExpectOnlyRecoveredIsWithheld(WithPeer(silent), false);
}

TEST(RecordExchangeTest, ANodeThatLearnedOfNoOtherServesAllIfItIsConfiguredTo) {
  const std::string silent = "127.0.0.1:" + std::to_string(FreePort());
  ExpectOnlyRecoveredIsWithheld(WithPeer(silent, true), true);
}

TEST(RecordExchangeTest, ANodeThatEtcdDoesNotRespondToWithholdsWhatItRecovered) {
  TestNodes::Settings settings;
  settings.count = 1;
  settings.ucx = false;
  settings.etcd = {"127.0.0.1:" + std::to_string(FreePort())};
  settings.change = [](int, Options& options) { options.log.severity = "off"; };
  ExpectOnlyRecoveredIsWithheld(settings, false);
}

}  // namespace
}  // namespace crumb::server
