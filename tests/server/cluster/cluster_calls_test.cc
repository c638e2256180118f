// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
// Lookup, Prefetch, Pin, Get and Put in a cluster of three crumbds of one process: calls to one
// node find, name and fetch the pages that another node's workers published.
#include <algorithm>
#include <cstring>
#include <set>

#include "crumb/v1/peer_service.grpc.pb.h"
#include "gtest/gtest.h"
#include "server/cluster/cluster.h"
#include "tests/common/eventually.h"
#include "tests/server/cluster/test_nodes.h"

namespace crumb::server {
namespace {

constexpr uint32_t kWaitMs = 10'000;
constexpr int kPages = 40;

class ClusterCallsTest : public testing::TestWithParam<bool> {
 protected:
  ClusterCallsTest() : nodes_(Settings()) {
    // Enough that each node is home of some.
    for (int i = 0; i < 8; ++i) sequences_.emplace_back(i, kPages);
  }

  void SetUp() override {
    ASSERT_TRUE(nodes_.WaitForView(3));
    writer_ = nodes_.Connect(0);
    reader_ = nodes_.Connect(1);
  }

  static TestNodes::Settings Settings() {
    TestNodes::Settings settings;
    settings.ucx = GetParam();
    settings.change = [](int, Options& options) {
      options.cluster.lookup_deadline = std::chrono::seconds(10);
    };
    return settings;
  }

  void Publish() {
    for (const TestSequence& sequence : sequences_) {
      ASSERT_EQ(sequence.Commit(*writer_), kPages);
    }
    WaitPushed();
  }
  void WaitPushed() {
    ASSERT_TRUE(Eventually([&] { return Series(0, "crumb_push_queue_pages") == 0; }));
  }
  double Series(int node, const std::string& name) {
    return SeriesOf(nodes_.daemon(node).endpoints().admin, name);
  }

  v1::LookupResponse Lookup(const TestSequence& sequence, uint32_t wait_ms) {
    v1::LookupRequest request;
    request.set_keyspace(reader_->keyspace().keyspace());
    request.set_keys(sequence.Keys());
    request.set_wait_ms(wait_ms);
    v1::LookupResponse response;
    const auto status = reader_->stub().Lookup(reader_->Context().get(), request, &response);
    EXPECT_TRUE(status.ok()) << status.error_message();
    return response;
  }

  bool AllInHostMemory(const TestSequence& sequence) {
    const v1::LookupResponse here = Lookup(sequence, 0);
    return std::count(here.page_tiers().begin(), here.page_tiers().end(), v1::TIER_HOST) == kPages;
  }

  TestNodes nodes_;
  std::vector<TestSequence> sequences_;
  std::unique_ptr<TestClient> writer_;
  std::unique_ptr<TestClient> reader_;
};

INSTANTIATE_TEST_SUITE_P(Planes, ClusterCallsTest, testing::Bool(),
                         [](const auto& plane) { return plane.param ? "Ucx" : "Grpc"; });

TEST_P(ClusterCallsTest, LookupNamesTheNodesThatHaveWhatThisOneLacks) {
  Publish();
  const double came_before = Series(1, "crumb_pulled_pages_total");  // the node is their home
  const std::set<std::string> others = {nodes_.IdOf(0), nodes_.IdOf(2)};
  int remote = 0;
  int here_alone = 0;
  for (const TestSequence& sequence : sequences_) {
    here_alone += static_cast<int>(Lookup(sequence, 0).hit_pages());
    const v1::LookupResponse found = Lookup(sequence, kWaitMs);
    EXPECT_EQ(found.hit_pages(), static_cast<uint32_t>(kPages));
    EXPECT_EQ(found.miss_reason(), v1::MISS_REASON_UNSPECIFIED);
    const auto& tiers = found.page_tiers();
    const auto elsewhere = std::count(tiers.begin(), tiers.end(), v1::TIER_REMOTE);
    ASSERT_EQ(found.page_nodes_size(), elsewhere);
    for (const uint32_t node : found.page_nodes()) {
      ASSERT_LT(node, static_cast<uint32_t>(found.nodes_size()));
      EXPECT_TRUE(others.contains(found.nodes(static_cast<int>(node))));
    }
    remote += static_cast<int>(elsewhere);
  }
  EXPECT_GT(remote, kPages);
  EXPECT_LE(here_alone, 8 * kPages - remote);
  // Nothing was leased, moved or counted as a token.
  EXPECT_EQ(Series(1, "crumb_pulls_total"), 0);
  EXPECT_EQ(Series(1, "crumb_pulled_pages_total"), came_before);
  EXPECT_GT(Series(1, "crumb_finds_total"), 0);
  EXPECT_EQ(Series(0, "crumb_peer_leases") + Series(2, "crumb_peer_leases"), 0);
}

TEST_P(ClusterCallsTest, LookupOfPagesThatNoNodeHasIsAMiss) {
  const v1::LookupResponse found = Lookup(TestSequence(99, 200), kWaitMs);
  EXPECT_EQ(found.hit_pages(), 0u);
  EXPECT_EQ(found.miss_reason(), v1::MISS_REASON_ABSENT);
}

TEST_P(ClusterCallsTest, PrefetchBringsPagesOfOtherNodes) {
  Publish();
  uint32_t requested = 0;
  for (const TestSequence& sequence : sequences_) {
    v1::PrefetchRequest request;
    request.set_keyspace(reader_->keyspace().keyspace());
    request.set_keys(sequence.Keys());
    v1::PrefetchResponse response;
    ASSERT_TRUE(reader_->stub().Prefetch(reader_->Context().get(), request, &response).ok());
    requested += response.requested_pages();
    EXPECT_TRUE(Eventually([&] { return AllInHostMemory(sequence); }));
  }
  EXPECT_GT(requested, 0u);
  EXPECT_TRUE(Eventually([&] { return Series(1, "crumb_leases") == 0; }));
}

TEST_P(ClusterCallsTest, PinBringsPagesOfOtherNodesAndKeepsThem) {
  Publish();
  v1::PinRequest request;
  request.set_keyspace(reader_->keyspace().keyspace());
  request.set_ttl_ms(60'000);
  uint32_t without = 0;
  for (const TestSequence& sequence : sequences_) {
    request.set_keys(sequence.Keys());
    request.set_wait_ms(0);
    v1::PinResponse response;
    ASSERT_TRUE(reader_->stub().Pin(reader_->Context().get(), request, &response).ok());
    without += response.pinned_pages();
    request.set_wait_ms(kWaitMs);
    ASSERT_TRUE(reader_->stub().Pin(reader_->Context().get(), request, &response).ok());
    EXPECT_EQ(response.pinned_pages(), static_cast<uint32_t>(kPages));
    EXPECT_TRUE(AllInHostMemory(sequence));
  }
  EXPECT_LT(without, static_cast<uint32_t>(8 * kPages));
}

TEST_P(ClusterCallsTest, GetReadsASinglePageOfAnotherNode) {
  Publish();
  for (const bool everyone : {false, true}) {
    for (int page : {3, 35}) {
      const TestSequence& sequence = sequences_[everyone ? 1 : 0];
      v1::GetRequest request;
      request.set_keyspace(reader_->keyspace().keyspace());
      request.set_keys(std::string(sequence.Key(page).view()));
      request.set_wait_ms(kWaitMs);
      request.set_everyone(everyone);
      if (!everyone) {
        request.set_first_page(static_cast<uint32_t>(page));
        request.set_run(std::string(sequence.Key(page / 32 * 32).view()));
      }
      const auto context = reader_->Context();
      const auto stream = reader_->stub().Get(context.get(), request);
      std::string header;
      std::string tiles;
      v1::GetResponse part;
      while (stream->Read(&part)) {
        header += part.header();
        tiles += part.tiles();
      }
      ASSERT_TRUE(stream->Finish().ok());
      const std::vector<std::byte> expected = sequence.Fragment(*reader_, page);
      const std::string got = tiles + header;
      ASSERT_EQ(got.size(), expected.size());
      EXPECT_EQ(std::memcmp(got.data(), expected.data(), got.size()), 0);
    }
  }
}

TEST_P(ClusterCallsTest, WhatWasPutOnOneNodeIsHitOnAnother) {
  for (const TestSequence& sequence : sequences_) {
    std::vector<std::vector<std::byte>> fragments;
    for (int page = 0; page < kPages; ++page) {
      fragments.push_back(sequence.Fragment(*writer_, page));
    }
    v1::PutResponse response;
    ASSERT_TRUE(writer_->Put(fragments, &response).ok());
    ASSERT_EQ(response.outcomes_size(), kPages);
  }
  WaitPushed();
  for (const TestSequence& sequence : sequences_) EXPECT_EQ(sequence.Read(*reader_), kPages);
}

// Leases of a node's store.
uint64_t LeasesOf(TestClient& client) {
  v1::StatsResponse stats;
  EXPECT_TRUE(client.stub().Stats(client.Context().get(), {}, &stats).ok());
  return stats.leases();
}

TEST(PeerReadTest, APeerThatDoesNotReadLosesItsStreamAndTheLeases) {
  TestNodes::Settings settings;
  settings.count = 2;
  settings.ucx = false;
  settings.change = [](int, Options& options) {
    options.limits.stream_progress_timeout = std::chrono::milliseconds(300);
  };
  TestNodes nodes(settings);
  ASSERT_TRUE(nodes.WaitForView(2));
  const auto client = nodes.Connect(0);
  const TestSequence sequence(1, 1'000);  // more bytes than a connection's buffers hold
  ASSERT_EQ(sequence.Commit(*client), 1'000);
  ASSERT_TRUE(Eventually([&] { return LeasesOf(*client) == 0; })) << "pages were pushed";

  const auto stub = v1::PeerService::NewStub(grpc::CreateChannel(
      "unix:" + nodes.daemon(0).endpoints().unix_socket, grpc::InsecureChannelCredentials()));
  v1::PeerHelloResponse hello;
  ASSERT_TRUE(stub->PeerHello(client->Context().get(), {}, &hello).ok());
  v1::TileRange range;
  range.set_layer_end(TestClient::kLayers);
  range.set_head_end(TestClient::kKvHeads);
  v1::PeerAcquireRequest session;
  session.mutable_caller()->set_node("another node");
  session.mutable_caller()->set_wire_version(hello.node().wire_max());
  session.set_keyspace(client->keyspace().keyspace());
  session.set_generation(client->keyspace().generation());
  *session.mutable_range() = range;
  v1::PeerAcquireResponse granted;
  ASSERT_TRUE(stub->PeerAcquire(client->Context().get(), session, &granted).ok());

  v1::PeerReadRequest read;
  read.set_session(granted.session());
  read.set_keyspace(session.keyspace());
  read.set_generation(session.generation());
  read.set_keys(sequence.Keys());
  *read.mutable_range() = range;
  const auto context = client->Context();
  context->set_deadline(std::chrono::system_clock::now() + std::chrono::hours(1));
  const auto stream = stub->PeerRead(context.get(), read);
  EXPECT_TRUE(Eventually([&] { return LeasesOf(*client) > 0; }));
  EXPECT_TRUE(Eventually([&] { return LeasesOf(*client) == 0; })) << "nothing was read";
  v1::PeerReadResponse part;
  while (stream->Read(&part)) {
  }
  EXPECT_FALSE(stream->Finish().ok());
  v1::StatsResponse stats;
  ASSERT_TRUE(client->stub().Stats(client->Context().get(), {}, &stats).ok());
  EXPECT_EQ(stats.counters().at("crumb_stalled_streams_total"), 1u);
}

}  // namespace
}  // namespace crumb::server
