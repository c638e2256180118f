// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
// The worst well-formed requests of other nodes, with Lookups beside them:
// calls/worst_requests_test.cc.
#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "server/cluster/peer_calls.h"
#include "server/cluster/protocol_versions.h"
#include "server/cluster/record_merger.h"
#include "server/keyspaces/keyspace_merge.h"
#include "tests/server/calls/worst_requests_fixture.h"
#include "tests/server/cluster/quiet_peer.h"

namespace crumb::server {
namespace {

constexpr int kPushPages = 2'048;  // cluster.peer_push_pages_max
constexpr size_t kRecordPageBytes = size_t{1} << 20;

v1::NodeRecord Self() {
  v1::NodeRecord self;
  self.set_id("self");
  self.set_wire_max(kWireMax);
  return self;
}

class WorstPeerRequestsTest : public WorstRequestsTest {
 protected:
  WorstPeerRequestsTest() { peers_.SetPeers({peer_, other_}); }

  template <typename Request>
  static Request From(const std::string& node) {
    Request request;
    request.mutable_caller()->set_node(node);
    request.mutable_caller()->set_wire_version(kWireMax);
    return request;
  }
  v1::PeerAcquireRequest AcquireOf(int family, bool lease) const {
    auto request = From<v1::PeerAcquireRequest>("peer");
    request.set_keyspace(std::string(keyspace_->id.view()));
    request.mutable_range()->set_layer_end(1);
    request.mutable_range()->set_head_end(1);
    request.set_lease(lease);
    request.set_refer(true);
    // Each page is a run of its own.
    for (int i = 0; i < kKeysMax; ++i) request.add_runs(std::string(FamilyKey(family, i).view()));
    return request;
  }
  v1::PeerPushRequest OfferOf(const std::string& node, int family, int pages) const {
    auto request = From<v1::PeerPushRequest>(node);
    request.mutable_keyspace()->set_keyspace(std::string(keyspace_->id.view()));
    request.mutable_keyspace()->mutable_record()->set_generation(keyspace_->generation.load());
    request.set_keys(FamilyKeys(family, pages));
    request.mutable_range()->set_layer_end(1);
    request.mutable_range()->set_head_end(1);
    for (int i = 0; i < pages; ++i) request.add_tile_bytes(kWideGeometry.int2_tile_bytes());
    request.set_session(std::string(16, 's'));
    return request;
  }
  // Returns the status that a call ended with, and expects that it ended at once.
  static absl::Status Ended(const std::function<void(PeerDone)>& call) {
    absl::Status ended = absl::UnknownError("the call has not ended");
    int times = 0;
    call([&](absl::Status status) {
      ended = std::move(status);
      ++times;
    });
    EXPECT_EQ(times, 1);
    return ended;
  }
  static TimePoint InAMinute() { return Clock::Real().Now() + std::chrono::seconds(60); }
  absl::Status Push(const v1::PeerPushRequest& request, v1::PeerPushResponse* response) {
    return Ended(
        [&](PeerDone done) { PeerPush(calls_, request, InAMinute(), response, std::move(done)); });
  }
  absl::Status Merge(const v1::PeerKeyspacesRequest& request, v1::PeerKeyspacesResponse* response) {
    return Ended([&](PeerDone done) { PeerKeyspaces(calls_, request, response, std::move(done)); });
  }

  const std::shared_ptr<QuietPeer> peer_ = std::make_shared<QuietPeer>("peer");
  const std::shared_ptr<QuietPeer> other_ = std::make_shared<QuietPeer>("other");
  Executor steps_{{"test-steps", 1, 64}};
  storage::DeadlineTimer timer_{Clock::Real()};
  PeerTable peers_{"self", 1};
  PageFlights flights_;
  ClusterMetrics counts_;
  PeerSessions grants_{256};
  PeerLeases leases_{
      *store_, Clock::Real(),
      PeerLeases::Bounds{
          .leases_max = 4096, .leases_per_node_max = 1024, .pages_per_node_max = 65'536},
      std::chrono::hours(1)};
  RemoteReader reader_{
      {*store_, peers_, flights_, timer_, steps_, Clock::Real(), counts_, 1024, [](const auto&) {}},
      256};
  PartyBudget push_pages_{kPushPages};
  HolderDirectory holders_{1 << 20};
  RecordMerger merger_{{*store_, *keyspaces_, counts_, kDeletionKeysMax, [](const KeyspaceId&) {}}};
  const PeerCallContext calls_{
      Clock::Real(),
      *store_,
      *keyspaces_,
      peers_,
      grants_,
      leases_,
      reader_,
      push_pages_,
      holders_,
      counts_,
      PushPolicy::kAlways,
      std::chrono::seconds(60),
      static_cast<size_t>(kKeysMax),
      kRecordPageBytes,
      Self,
      [this](const auto& entries, const auto& done) { done(merger_.Merge(entries)); },
      {}};
};

// Runs of one page each, all of which are here, and for all of which this node knows a holder.
TEST_F(WorstPeerRequestsTest, PeerAcquireOfAsManyRunsAsItMayName) {
  StoreChain(1, kKeysMax);
  auto note = OfferOf("other", 1, kKeysMax);
  note.set_note_only(true);
  v1::PeerPushResponse noted;
  ASSERT_TRUE(Push(note, &noted).ok());
  for (const bool lease : {false, true}) {
    const v1::PeerAcquireRequest request = AcquireOf(1, lease);
    ExpectHarmless([&] {
      v1::PeerAcquireResponse response;
      const absl::Status status = Ended([&](PeerDone done) {
        PeerAcquire(calls_, request, TimePoint::max(), &response, std::move(done));
      });
      EXPECT_TRUE(status.ok()) << status;
      EXPECT_EQ(response.hit_pages_size(), kKeysMax);
      EXPECT_LT(response.ByteSizeLong(), size_t{4} << 20);
      leases_.Release("peer", response.lease());
    });
  }
}

// Pages of which parts are at another node already, so that each page has to be looked for there.
TEST_F(WorstPeerRequestsTest, PeerPushOfAsManyPagesAsItMayName) {
  int family = 1;
  ExpectHarmless([&] {
    v1::PeerPushResponse response;
    Push(OfferOf("peer", family, kKeysMax), &response).IgnoreError();  // beyond the budget
    auto note = OfferOf("other", family, kKeysMax);
    note.set_note_only(true);
    EXPECT_TRUE(Push(note, &response).ok());
    ++family;
  });
}

TEST_F(WorstPeerRequestsTest, PeerPushOfAsManyPagesAsAreFetched) {
  int family = 1;
  ExpectHarmless([&] {
    v1::PeerPushResponse response;
    const auto request = OfferOf("peer", family++, kPushPages);
    std::atomic<int> ended{0};
    PeerPush(calls_, request, InAMinute(), &response, [&](const absl::Status&) { ++ended; });
    for (int i = 0; i < 10'000 && ended == 0; ++i) {
      peer_->CompleteFetches();
      std::this_thread::yield();
    }
    EXPECT_EQ(ended, 1);
    EXPECT_EQ(response.failed(), static_cast<uint32_t>(kPushPages));
  });
}

// Records of a keyspace that is open here, with as many deletions as records list, and of as many
// keyspaces as a message has room for, which this node does not know.
TEST_F(WorstPeerRequestsTest, PeerKeyspacesOfAsManyRecordsAsAMessageHolds) {
  StoreChain(1, kKeysMax);
  auto deletions = From<v1::PeerKeyspacesRequest>("peer");
  v1::KeyspaceEntry& entry = *deletions.add_keyspaces();
  entry.set_keyspace(std::string(keyspace_->id.view()));
  *entry.mutable_record() = keyspaces_->RecordOf(keyspace_->id);
  for (int i = 0; i < kKeysMax; ++i) {
    v1::Deletion& deletion = *entry.mutable_record()->add_deletions();
    deletion.set_node("peer");
    deletion.set_number(static_cast<uint64_t>(i) + 1);
    deletion.set_keys(std::string(FamilyKey(1, i).view()));
  }
  ASSERT_LT(deletions.ByteSizeLong(), size_t{4} << 20);
  ExpectHarmless([&] {
    v1::PeerKeyspacesResponse response;
    const absl::Status merged = Merge(deletions, &response);
    EXPECT_TRUE(merged.ok()) << merged;
  });
  EXPECT_LT(store_->Stats().host.pages, 10u) << "they are deleted";

  v1::KeyspaceRecord record = keyspaces_->RecordOf(keyspace_->id);
  record.clear_deletions();
  record.set_generation(7);
  auto unknown = From<v1::PeerKeyspacesRequest>("peer");
  for (int i = 0; i < 20'000; ++i) {
    v1::KeyspaceEntry& each = *unknown.add_keyspaces();
    each.set_keyspace(std::string(FamilyKey(9, i).view()));
    *each.mutable_record() = record;
  }
  ASSERT_LT(unknown.ByteSizeLong(), size_t{4} << 20);
  ExpectHarmless([&] {
    v1::PeerKeyspacesResponse response;
    Merge(unknown, &response).IgnoreError();  // there is no room for so many keyspaces
    EXPECT_LT(response.ByteSizeLong(), size_t{4} << 20);
  });
}

}  // namespace
}  // namespace crumb::server
