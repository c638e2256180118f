// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <atomic>
#include <cstring>
#include <future>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "server/cluster/peer_calls.h"
#include "server/cluster/remote_reader.h"
#include "tests/server/call_fixture.h"

namespace crumb::server {

// A node whose pages are the fixture's and whose behaviour is set by the test.
class FakePeer : public Peer {
 public:
  using MakeFragment = std::function<std::vector<std::byte>(const PageKey&)>;

  FakePeer(const std::string& id, const Clock& clock, MakeFragment make)
      : Peer(RecordOf(id), {.failures = 2, .open_for = std::chrono::hours(1)}, clock),
        make_(std::move(make)) {}

  static v1::NodeRecord RecordOf(const std::string& id) {
    v1::NodeRecord record;
    record.set_id(id);
    return record;
  }

  // Responds to the requests that came while it was silent.
  void RespondLate() {
    std::vector<Callback<v1::PeerAcquireResponse>> late;
    {
      MutexLock lock(&mutex);
      late.swap(held);
    }
    for (const auto& reply : late) reply(absl::DeadlineExceededError("late"));
  }

  void Acquire(v1::PeerAcquireRequest request, TimePoint,
               Callback<v1::PeerAcquireResponse> reply) override {
    ++queries;
    runs_requested += request.runs_size();
    if (silent) {
      MutexLock lock(&mutex);
      held.push_back(std::move(reply));
      return;
    }
    v1::PeerAcquireResponse response;
    response.set_session(std::string(16, 's'));
    if (request.lease()) response.set_lease(++leases);
    NoteShortfalls(request);
    const std::vector<std::string> nodes = Referred(request);
    for (int index = 0; index < request.runs_size(); ++index) {
      const auto count = static_cast<uint32_t>(request.runs(index).size() / sizeof(PageKey));
      if (!nodes.empty()) {
        response.add_hit_pages(0);
        v1::PeerReferral* const referral = response.add_referrals();
        referral->set_run(static_cast<uint32_t>(index));
        referral->set_pages(std::min(count, refers_pages.load()));
        for (const std::string& node : nodes) referral->add_nodes(node);
        continue;
      }
      const uint32_t hits = absent ? 0 : std::min(count, hits_max.load());
      response.add_hit_pages(hits);
      for (uint32_t i = 0; i < hits; ++i) response.add_tile_bytes(tile_bytes);
    }
    if (nonsense) response.add_hit_pages(5);
    reply(std::move(response));
  }
  void Release(uint64_t) override { ++released; }
  void Push(v1::PeerPushRequest, TimePoint, Callback<v1::PeerPushResponse> reply) override {
    reply(absl::UnimplementedError("not in this test"));
  }
  void Keyspaces(v1::PeerKeyspacesRequest, TimePoint,
                 Callback<v1::PeerKeyspacesResponse> reply) override {
    reply(absl::UnimplementedError("not in this test"));
  }
  void Drain(TimePoint, Callback<v1::PeerDrainResponse> reply) override {
    reply(absl::UnimplementedError("not in this test"));
  }
  void Fetch(transport::FetchRequest request, transport::FetchDone done) override {
    ++fetches;
    pages_fetched += static_cast<int>(request.pages.size());
    transport::FetchResponse reply;
    for (const transport::RequestedPage& wish : request.pages) {
      const std::vector<std::byte> fragment = make_(wish.key);
      const size_t tiles = FragmentTilesBytes(wish.range.tiles(), wish.tile_bytes);
      std::memcpy(wish.places.first, fragment.data(), tiles);
      FragmentHeader header = DecodeFragmentHeader(std::span(fragment).subspan(tiles)).value();
      if (wrong_key || wish.key == corrupt) header.key.bytes[0] ^= 1;
      transport::PageResponse page;
      if (reply.pages.size() >= late_behind) {
        page.status = transport::PageStatus::kDeadline;
        reply.pages.push_back(std::move(page));
        continue;
      }
      page.status = transport::PageStatus::kHit;
      page.fragments.push_back({header, wish.range});
      reply.pages.push_back(std::move(page));
    }
    if (hold_fetches) {
      MutexLock lock(&mutex);
      held_fetches.push_back([done, reply] { done(reply); });
      return;
    }
    done(std::move(reply));
  }
  const char* transport() const override { return "fake"; }

  void ReferTo(const std::vector<std::string>& nodes) {
    MutexLock lock(&mutex);
    refers_to = nodes;
  }
  // The shortfalls reported to this node: "NODE has PAGES".
  std::vector<std::string> shortfalls() {
    MutexLock lock(&mutex);
    return lacking;
  }
  size_t fetches_held() {
    MutexLock lock(&mutex);
    return held_fetches.size();
  }
  void CompleteHeldFetches() {
    std::vector<std::function<void()>> ready;
    {
      MutexLock lock(&mutex);
      ready.swap(held_fetches);
    }
    for (const auto& reply : ready) reply();
  }

  std::atomic<int> queries{0}, runs_requested{0}, fetches{0}, pages_fetched{0}, released{0};
  std::atomic<uint64_t> leases{0};
  std::atomic<uint32_t> hits_max{UINT32_MAX};
  std::atomic<uint32_t> refers_pages{UINT32_MAX};
  std::atomic<bool> silent{false}, absent{false}, nonsense{false}, wrong_key{false};
  std::atomic<bool> hold_fetches{false};
  std::atomic<size_t> late_behind{SIZE_MAX};  // pages of a fetch that come in time
  uint32_t tile_bytes = 0;
  PageKey corrupt;  // a page in whose place another one is sent
  Mutex mutex;
  std::vector<Callback<v1::PeerAcquireResponse>> held ABSL_GUARDED_BY(mutex);
  std::vector<std::function<void()>> held_fetches ABSL_GUARDED_BY(mutex);
  std::vector<std::string> refers_to ABSL_GUARDED_BY(mutex);
  std::vector<std::string> lacking ABSL_GUARDED_BY(mutex);

 private:
  void NoteShortfalls(const v1::PeerAcquireRequest& request) {
    MutexLock lock(&mutex);
    for (const v1::PeerShortfall& each : request.not_at()) {
      lacking.push_back(each.node() + " has " + std::to_string(each.pages()));
    }
  }
  std::vector<std::string> Referred(const v1::PeerAcquireRequest& request) {
    MutexLock lock(&mutex);
    return request.refer() ? refers_to : std::vector<std::string>();
  }

  const MakeFragment make_;
};

class PullTest : public CallFixture {
 protected:
  static constexpr int kPeers = 3;

  PullTest() : steps_({"steps", 2, 1024}), timer_(Clock::Real()) {
    std::vector<PlacementNode> nodes;
    PeerTable::Peers peers;
    for (int i = 0; i < kPeers; ++i) {
      auto peer = std::make_shared<FakePeer>("peer-" + std::to_string(i), Clock::Real(),
                                             [this](const PageKey& key) { return Fragment(key); });
      peer->tile_bytes = kGeometry.int2_tile_bytes();
      fakes_.push_back(peer);
      peers.push_back(peer);
      PlacementNode node;
      node.id = peer->id();
      node.host = node.id;
      nodes.push_back(node);
    }
    peers_.SetPeers(peers);
    peers_.history().Install(1, nodes);
  }
  ~PullTest() override { steps_.Stop(); }

  PullRequest Request(int first, int count, Duration most = std::chrono::seconds(10)) {
    PullRequest request;
    request.keyspace = keyspace_;
    for (int i = first; i < first + count; ++i) request.keys.push_back(Key(i));
    request.first_page = static_cast<uint32_t>(first);
    request.run = Key(first / static_cast<int>(kRunPages) * static_cast<int>(kRunPages));
    request.range = kGeometry.all_tiles();
    request.deadline = Clock::Real().Now() + most;
    return request;
  }

  PullResult Pull(PullRequest request) {
    std::promise<PullResult> completed;
    reader_.Pull(std::move(request), [&](PullResult result) { completed.set_value(result); });
    return completed.get_future().get();
  }

  FoundPages Find(PullRequest request) {
    std::promise<FoundPages> completed;
    reader_.Find(std::move(request),
                 [&](FoundPages found) { completed.set_value(std::move(found)); });
    return completed.get_future().get();
  }

  int Sum(std::atomic<int> FakePeer::*member) const {
    int sum = 0;
    for (const auto& fake : fakes_) sum += (*fake).*member;
    return sum;
  }

  // Returns the context of calls of this node's peers: at most 64 keys a call.
  PeerCallContext PeerCalls() {
    return {Clock::Real(),
            store_,
            *keyspaces_,
            peers_,
            grants_,
            leases_,
            reader_,
            push_pages_,
            holders_,
            counts_,
            PushPolicy::kAlways,
            std::chrono::seconds(10),
            64,
            1 << 20,
            [] {
              v1::NodeRecord self;
              self.set_id("self");
              self.set_wire_max(kWireMax);
              return self;
            },
            {},
            {}};
  }

  std::vector<std::shared_ptr<FakePeer>> fakes_;
  Executor steps_;
  storage::DeadlineTimer timer_;
  PeerTable peers_{"self", 1};
  PageFlights flights_;
  ClusterMetrics counts_;
  std::atomic<int> received_{0};
  PeerSessions grants_{4};
  PeerLeases leases_{store_, Clock::Real(), {.leases_max = 4}, std::chrono::seconds(10)};
  PartyBudget push_pages_{1024};
  HolderDirectory holders_{1 << 16};
  RemoteReader reader_{{store_, peers_, flights_, timer_, steps_, Clock::Real(), counts_, 1024,
                        [this](const std::string&) { ++received_; }},
                       4};
};

}  // namespace crumb::server
