// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
// Calls between nodes (PeerService) as a hostile node makes them, one after the other against the
// same node, below gRPC. The input is a sequence of messages: a byte that says which call, and
// whether its keyspace and session are set to ones that exist; the size in two bytes; the message.
#include <algorithm>
#include <cstring>
#include <memory>
#include <string>

#include "server/cluster/page_source.h"
#include "server/cluster/peer_calls.h"
#include "tests/fuzz/fuzz_target.h"
#include "tests/server/call_fixture.h"

namespace crumb::fuzz {
namespace {

using namespace server;

enum class Kind : unsigned char {
  kAcquire,
  kRelease,
  kPush,
  kRead,
  kKeyspaces,
  kHello,
  kCompleteFetches,  // the hostile node completes its fetches with no pages
  kKinds
};
constexpr unsigned kKnownBit = 1u << 7;
constexpr size_t kCallsMax = 32;
constexpr size_t kKeysMax = 64;
constexpr size_t kRecordPageBytes = 4096;
constexpr size_t kPushPagesMax = 16;
constexpr size_t kDirectoryPages = 8;
constexpr size_t kReadsMax = 3;
constexpr PeerLeases::Bounds kLeases = {
    .leases_max = 8, .leases_per_node_max = 4, .pages_per_node_max = 16};

// The hostile node as this one calls it.
class HostilePeer final : public Peer {
 public:
  HostilePeer()
      : Peer(Record(), {.failures = 1, .open_for = std::chrono::seconds(1)}, Clock::Real()) {}
  static v1::NodeRecord Record() {
    v1::NodeRecord record;
    record.set_id("hostile");
    return record;
  }
  void Acquire(v1::PeerAcquireRequest, TimePoint, Callback<v1::PeerAcquireResponse>) override {}
  void Release(uint64_t) override {}
  void Push(v1::PeerPushRequest, TimePoint, Callback<v1::PeerPushResponse>) override {}
  void Keyspaces(v1::PeerKeyspacesRequest, TimePoint,
                 Callback<v1::PeerKeyspacesResponse>) override {}
  void Drain(TimePoint, Callback<v1::PeerDrainResponse>) override {}
  void Fetch(transport::FetchRequest request, transport::FetchDone done) override {
    MutexLock lock(&mutex_);
    pages_ += request.pages.size();
    fetches_.emplace_back(std::move(request), std::move(done));
  }
  const char* transport() const override { return "fake"; }

  size_t pages() {
    MutexLock lock(&mutex_);
    return pages_;
  }
  void CompleteFetches() {
    std::vector<std::pair<transport::FetchRequest, transport::FetchDone>> fetches;
    {
      MutexLock lock(&mutex_);
      fetches.swap(fetches_);
      pages_ = 0;
    }
    for (auto& [request, done] : fetches) {
      transport::FetchResponse response;
      response.pages.resize(request.pages.size());
      done(std::move(response));
    }
  }

 private:
  Mutex mutex_;
  size_t pages_ ABSL_GUARDED_BY(mutex_) = 0;
  std::vector<std::pair<transport::FetchRequest, transport::FetchDone>> fetches_
      ABSL_GUARDED_BY(mutex_);
};

class Node final : public CallFixture {
 public:
  Node() {
    for (int i = 0; i < 4; ++i) Store(Key(i));
    peers_.SetPeers({hostile_});
  }
  ~Node() override {
    hostile_->CompleteFetches();
    steps_.Stop();
    responses_.clear();
  }
  void TestBody() override {}

  void Call(Kind kind, bool known, const std::string& bytes);
  // Checks the bounds that hold after every call, whatever it was.
  void CheckBounds();
  // Everything that the hostile node held is given back in the end.
  void CheckEnd();

  v1::PeerCaller Caller() const {
    v1::PeerCaller caller;
    caller.set_node("hostile");
    caller.set_wire_version(kWireMax);
    return caller;
  }
  std::string keyspace() const { return std::string(keyspace_->id.view()); }
  static std::string SeedKeys(int first, int count) { return Keys(first, count); }
  static constexpr Geometry kShape = kGeometry;

 private:
  template <typename Request>
  bool Read(const std::string& bytes, bool known, Request& request) const {
    if (!request.ParseFromString(bytes)) return false;
    if (!known) return true;
    if constexpr (requires { request.mutable_caller(); }) *request.mutable_caller() = Caller();
    if constexpr (requires { request.set_keyspace(std::string()); }) {
      request.set_keyspace(keyspace());
    }
    return true;
  }
  void CallAcquire(bool known, const std::string& bytes);
  void CallPush(bool known, const std::string& bytes);
  void CallRead(bool known, const std::string& bytes);
  void CallKeyspaces(bool known, const std::string& bytes);

  const std::shared_ptr<HostilePeer> hostile_ = std::make_shared<HostilePeer>();
  Executor steps_{{"fuzz-steps", 1, 64}};
  storage::DeadlineTimer timer_{Clock::Real()};
  PeerTable peers_{"self", 1};
  PageFlights flights_;
  ClusterMetrics counts_;
  PeerSessions grants_{4};
  HolderDirectory holders_{kDirectoryPages};
  PeerLeases leases_{store_, Clock::Real(), kLeases, std::chrono::hours(1)};
  RemoteReader reader_{{store_,
                        peers_,
                        flights_,
                        timer_,
                        steps_,
                        Clock::Real(),
                        counts_,
                        1024,
                        [](const auto&) {},
                        &holders_,
                        {}},
                       4};
  PartyBudget push_pages_{kPushPagesMax};
  PageSource source_{store_, *keyspaces_, grants_, counts_, kReadsMax};
  std::vector<transport::SourceResponse> responses_;  // reads that the hostile node does not take
  const PeerCallContext calls_{.clock = Clock::Real(),
                               .store = store_,
                               .keyspaces = *keyspaces_,
                               .peers = peers_,
                               .sessions = grants_,
                               .leases = leases_,
                               .reader = reader_,
                               .push_pages = push_pages_,
                               .holders = holders_,
                               .metrics = counts_,
                               .push_policy = PushPolicy::kAlways,
                               .push_deadline = std::chrono::seconds(60),
                               .keys_max = kKeysMax,
                               .record_page_bytes = kRecordPageBytes,
                               .self =
                                   [] {
                                     v1::NodeRecord self;
                                     self.set_id("self");
                                     self.set_wire_max(kWireMax);
                                     return self;
                                   },
                               .merge =
                                   [this](std::vector<v1::KeyspaceEntry> entries,
                                          const std::function<void(absl::Status)>& done) {
                                     absl::Status first;
                                     for (const auto& entry : entries) first.Update(Merge(entry));
                                     done(first);
                                   },
                               .drain = [] { return absl::OkStatus(); }};

  absl::Status Merge(const v1::KeyspaceEntry& entry) {
    const auto id = KeyspaceId::FromBytes(entry.keyspace());
    if (!id.ok()) return id.status();
    const uint64_t before = keyspaces_->RecordOf(*id).generation();
    const auto merged = keyspaces_->Merge(*id, entry.record(), 64);
    // Generations only rise, and records keep to their bounds.
    const v1::KeyspaceRecord record = keyspaces_->RecordOf(*id);
    Check(record.generation() >= before);
    size_t keys = 0;
    for (const auto& deletion : record.deletions()) keys += deletion.keys().size() / 32;
    Check(keys <= 64);
    return merged.status();
  }
};

void Node::CallAcquire(bool known, const std::string& bytes) {
  v1::PeerAcquireRequest request;
  if (!Read(bytes, known, request)) return;
  request.set_wait_ms(0);
  v1::PeerAcquireResponse response;
  int times = 0;
  PeerAcquire(calls_, request, TimePoint::max(), &response, [&](const absl::Status& status) {
    ++times;
    if (!status.ok()) return;
    size_t requested = 0;
    size_t hits = 0;
    for (const std::string& run : request.runs()) requested += run.size() / sizeof(PageKey);
    for (const uint32_t hit : response.hit_pages()) hits += hit;
    Check(response.hit_pages_size() == request.runs_size() ||
          (request.runs().empty() && response.hit_pages().empty()));
    Check(hits <= std::min(requested, kKeysMax));
    Check(static_cast<size_t>(response.tile_bytes_size()) == hits);
    Check(response.lease() == 0 || (hits > 0 && request.lease()));
  });
  Check(times == 1);
}

void Node::CallPush(bool known, const std::string& bytes) {
  auto request = std::make_shared<v1::PeerPushRequest>();
  if (!Read(bytes, false, *request)) return;
  if (known) {
    *request->mutable_caller() = Caller();
    request->mutable_keyspace()->set_keyspace(keyspace());
  }
  auto response = std::make_shared<v1::PeerPushResponse>();
  PeerPush(
      calls_, *request, Clock::Real().Now() + std::chrono::seconds(60), response.get(),
      [request, response](const absl::Status& status) {
        if (!status.ok()) return;
        const size_t keys = request->keys().size() / sizeof(PageKey);
        Check(size_t{response->stored()} + response->deduplicated() + response->failed() == keys);
        for (const uint32_t page : response->failed_pages()) Check(page < keys);
      });
}

void Node::CallRead(bool known, const std::string& bytes) {
  v1::PeerReadRequest request;
  if (!Read(bytes, false, request)) return;
  if (known) {
    const auto session = grants_.Grant("hostile", keyspace_->id).value();
    request.set_keyspace(keyspace());
    request.set_session(std::string(session.begin(), session.end()));
  }
  auto wanted = SourceRequestOf(calls_, request, TimePoint::max());
  if (!wanted.ok()) return;
  Check(wanted->pages.size() <= kKeysMax);
  const size_t pages = wanted->pages.size();
  source_.Acquire(*std::move(wanted), [&](transport::SourceResponse response) {
    Check(response.pages.size() == pages);
    for (const auto& page : response.pages) {
      Check((page.status == transport::PageStatus::kHit) == !page.fragments.empty());
    }
    responses_.push_back(std::move(response));
  });
}

void Node::CallKeyspaces(bool known, const std::string& bytes) {
  v1::PeerKeyspacesRequest request;
  if (!Read(bytes, false, request)) return;
  if (known) {
    *request.mutable_caller() = Caller();
    for (auto& entry : *request.mutable_keyspaces()) entry.set_keyspace(keyspace());
  }
  v1::PeerKeyspacesResponse response;
  int times = 0;
  PeerKeyspaces(calls_, request, &response, [&](const absl::Status&) { ++times; });
  Check(times == 1);
  Check(response.keyspaces_size() <= 1 || !response.paged() ||
        response.ByteSizeLong() <= 2 * kRecordPageBytes);
}

void Node::Call(Kind kind, bool known, const std::string& bytes) {
  switch (kind) {
    case Kind::kAcquire:
      return CallAcquire(known, bytes);
    case Kind::kRelease: {
      v1::PeerReleaseRequest request;
      if (Read(bytes, known, request)) PeerRelease(calls_, request).IgnoreError();
      return;
    }
    case Kind::kPush:
      return CallPush(known, bytes);
    case Kind::kRead:
      return CallRead(known, bytes);
    case Kind::kKeyspaces:
      return CallKeyspaces(known, bytes);
    case Kind::kHello: {
      v1::PeerHelloResponse response;
      PeerHello(calls_, &response);
      Check(response.node().id() == "self");
      return;
    }
    default:
      return hostile_->CompleteFetches();
  }
}

void Node::CheckBounds() {
  Check(leases_.size() <= kLeases.leases_per_node_max * 2);  // its own, and those of strangers
  Check(push_pages_.held("hostile") <= kPushPagesMax);
  Check(hostile_->pages() <= kPushPagesMax);
  const auto served = std::count_if(responses_.begin(), responses_.end(),
                                    [](const auto& response) { return response.lease != nullptr; });
  Check(static_cast<size_t>(served) <= kReadsMax);
}

void Node::CheckEnd() {
  hostile_->CompleteFetches();
  steps_.Stop();
  responses_.clear();
  for (const char* node : {"hostile", ""}) {
    for (uint64_t lease = 1; lease <= kCallsMax; ++lease) leases_.Release(node, lease);
  }
  Check(leases_.size() == 0);
  Check(push_pages_.held("hostile") == 0);
  Check(store_.Stats().leases == 0);
}

void Run(std::span<const std::byte> input) {
  const std::string bytes = TextOf(input);
  Node node;
  size_t calls = 0;
  for (size_t at = 0; at + 3 <= bytes.size() && calls < kCallsMax; ++calls) {
    const auto first = static_cast<unsigned char>(bytes[at]);
    const size_t size = static_cast<uint8_t>(bytes[at + 1]) | static_cast<uint8_t>(bytes[at + 2])
                                                                  << 8;
    const auto kind = static_cast<Kind>((first & ~kKnownBit) % static_cast<unsigned>(Kind::kKinds));
    node.Call(kind, (first & kKnownBit) != 0, bytes.substr(at + 3, size));
    node.CheckBounds();
    at += 3 + size;
  }
  node.CheckEnd();
}

std::string Message(Kind kind, const std::string& bytes) {
  std::string message(1, static_cast<char>(static_cast<unsigned>(kind) | kKnownBit));
  message += {static_cast<char>(bytes.size() & 255), static_cast<char>(bytes.size() >> 8)};
  return message + bytes;
}

template <typename Request>
void SetRange(Request& request) {
  request.mutable_range()->set_layer_end(Node::kShape.layers);
  request.mutable_range()->set_head_end(Node::kShape.kv_heads);
}

std::vector<std::string> Seeds() {
  v1::PeerAcquireRequest acquire;
  acquire.set_generation(1);
  SetRange(acquire);
  acquire.add_runs(Node::SeedKeys(0, 3));
  acquire.add_runs(Node::SeedKeys(8, 2));
  acquire.set_lease(true);
  v1::PeerReleaseRequest release;
  release.add_leases(1);
  v1::PeerPushRequest push;
  push.set_keys(Node::SeedKeys(2, 4));
  SetRange(push);
  for (int i = 0; i < 4; ++i) push.add_tile_bytes(Node::kShape.int2_tile_bytes());
  push.set_session(std::string(16, 's'));
  v1::PeerReadRequest read;
  read.set_generation(1);
  SetRange(read);
  read.set_keys(Node::SeedKeys(1, 6));
  v1::PeerKeyspacesRequest keyspaces;
  keyspaces.set_paged(true);
  v1::KeyspaceRecord& record = *keyspaces.add_keyspaces()->mutable_record();
  record.set_generation(2);
  record.set_state_version(1);
  v1::Deletion& deletion = *record.add_deletions();
  deletion.set_node("hostile");
  deletion.set_number(1);
  deletion.set_keys(Node::SeedKeys(0, 2));
  (*record.mutable_forgotten_deletions())["another"] = 7;
  const std::string acquired = Message(Kind::kAcquire, acquire.SerializeAsString());
  const std::string offered = Message(Kind::kPush, push.SerializeAsString());
  const std::string fetched = Message(Kind::kRead, read.SerializeAsString());
  const std::string dropped = Message(Kind::kKeyspaces, keyspaces.SerializeAsString());
  return {acquired + Message(Kind::kRelease, release.SerializeAsString()),
          offered + offered + Message(Kind::kCompleteFetches, "") + offered,
          fetched + fetched + fetched + fetched, dropped + acquired + fetched,
          Message(Kind::kHello, "") + acquired + acquired + acquired + acquired + acquired};
}

}  // namespace

const FuzzTarget kPeerTarget = {"peer", Run, Seeds};

}  // namespace crumb::fuzz
