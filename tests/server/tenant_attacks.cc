// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
// How one tenant, or a caller without a token, takes all it can get of each resource.
#include <sys/socket.h>

#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "common/fd_channel.h"
#include "common/roster.h"
#include "gtest/gtest.h"
#include "tests/common/eventually.h"
#include "tests/server/flood.h"
#include "tests/server/raw_connections.h"
#include "tests/server/two_tenants.h"
#include "tests/server/unfinished_calls.h"

namespace crumb::server {
namespace {

using Stub = TwoTenants::Stub;

// A Put whose caller sends nothing: each stream holds a place.
void SilentPuts(const Attacker& a) {
  for (int i = 0; i < 2 * a.crumbd.options().limits.put_streams; ++i) {
    auto response = std::make_shared<v1::PutResponse>();
    auto stream = std::shared_ptr(a.stub.Put(a.Context(), response.get()));
    v1::PutRequest first;
    first.set_keyspace(a.session.keyspace().keyspace());
    stream->Write(first);
    a.attack.kept.insert(a.attack.kept.end(), {response, stream});
  }
}

// A Get whose caller does not read: each stream holds a place and leases on all its pages, which
// are more than the connection's windows hold. They are stored first: those of earlier rounds may
// have left memory, and a Get without pages ends at once.
void UnreadGets(const Attacker& a) {
  constexpr int kPages = 400;
  std::vector<std::vector<std::byte>> fragments;
  for (int page = 0; page < kPages; ++page) {
    fragments.push_back(a.session.Fragment(TestClient::Key(3'000'000 + page), 1));
  }
  v1::PutResponse stored;
  ASSERT_TRUE(a.session.Put(fragments, &stored).ok());
  for (int i = 0; i < 2 * a.crumbd.options().limits.get_streams; ++i) {
    auto request = std::make_shared<v1::GetRequest>();
    request->set_keyspace(a.session.keyspace().keyspace());
    request->set_keys(TestClient::Keys(3'000'000, kPages));
    a.attack.kept.push_back(std::shared_ptr(a.stub.Get(a.Context(), *request)));
  }
}

void PinEverything(const Attacker& a) {
  for (int first = 0; first < kAttackerPages; first += 100) {
    v1::PinRequest request;
    request.set_keyspace(a.session.keyspace().keyspace());
    request.set_keys(TestClient::Keys(first, 100));
    request.set_ttl_ms(24 * 3600 * 1000);
    v1::PinResponse response;
    a.stub.Pin(a.Context(), request, &response);
  }
}

// Opens the first `count` keyspaces of tenant a, again if they are open. Returns those it got.
std::vector<std::string> OpenKeyspaces(const Attacker& a, int64_t count) {
  std::vector<std::string> opened;
  for (int64_t i = 0; i < count; ++i) {
    v1::OpenKeyspaceRequest request;
    (*request.mutable_fields())["model"] = "m" + std::to_string(i);
    request.set_layers(2);
    request.set_kv_heads(2);
    request.set_head_dim(64);
    request.set_group_size(32);
    v1::OpenKeyspaceResponse response;
    const bool open = a.stub.OpenKeyspace(a.Context(), request, &response).ok();
    if (open) opened.push_back(response.keyspace());
  }
  return opened;
}

void OpenAllKeyspaces(const Attacker& a) {
  OpenKeyspaces(a, 2 * a.crumbd.options().limits.keyspaces_max);
}

void LeaseEverything(const Attacker& a) {
  for (int page = 0; page < kAttackerPages; ++page) {
    v1::AcquireResponse response;
    a.session.Acquire(TestClient::Keys(page, 1), &response);
  }
}

// Pages of the attacks below on host memory: more than it has room for, in calls of kBatch.
constexpr int kHeldPages = 1'500;
constexpr int kBatch = 50;
constexpr TileRange kOneTile = {{0, 1}, {0, 1}};
constexpr TileRange kAllTiles = {{0, TestClient::kLayers}, {0, TestClient::kKvHeads}};

void PutTiles(const Attacker& a, int first, const TileRange& range) {
  std::vector<std::vector<std::byte>> fragments;
  for (int page = first; page < first + kBatch; ++page) {
    fragments.push_back(a.session.Fragment(TestClient::Key(page), 1, range));
  }
  v1::PutResponse response;
  ASSERT_TRUE(a.session.Put(fragments, &response).ok());
}

void DeletePages(const Attacker& a, int first) {
  v1::DeleteRequest request;
  request.set_keyspace(a.session.keyspace().keyspace());
  request.set_keys(TestClient::Keys(first, kBatch));
  v1::DeleteResponse response;
  ASSERT_TRUE(a.stub.Delete(a.Context(), request, &response).ok());
}

// Commits and leases the same pages repeatedly: each lease keeps a copy that no key names any more.
void LeaseAndDelete(const Attacker& a) {
  for (int pages = 0; pages < kHeldPages; pages += kBatch) {
    PutTiles(a, 4'000'000, kAllTiles);
    v1::AcquireResponse response;
    ASSERT_TRUE(a.session.Acquire(TestClient::Keys(4'000'000, kBatch), &response).ok());
    DeletePages(a, 4'000'000);
  }
}

// Calls streams and reads one message of each.
void GetAndDelete(const Attacker& a) {
  for (int pages = 0; pages < kHeldPages; pages += kBatch) {
    PutTiles(a, 5'000'000, kAllTiles);
    v1::GetRequest request;
    request.set_keyspace(a.session.keyspace().keyspace());
    request.set_keys(TestClient::Keys(5'000'000, kBatch));
    const auto stream = std::shared_ptr(a.stub.Get(a.Context(), request));
    v1::GetResponse response;
    stream->Read(&response);
    a.attack.kept.push_back(stream);
    DeletePages(a, 5'000'000);
  }
}

// Leases of one tile of each page, which keep all of its tiles.
void LeaseOneTile(const Attacker& a) {
  for (int first = 6'000'000; first < 6'000'000 + kHeldPages; first += kBatch) {
    PutTiles(a, first, kOneTile);
    PutTiles(a, first, kAllTiles);
    v1::AcquireRequest request;
    request.set_keyspace(a.session.keyspace().keyspace());
    request.set_keys(TestClient::Keys(first, kBatch));
    request.mutable_range()->set_layer_end(1);
    request.mutable_range()->set_head_end(1);
    v1::AcquireResponse response;
    ASSERT_TRUE(a.session.stub().Acquire(a.session.Context().get(), request, &response).ok());
  }
}

// Pins of pages of one tile, to which the others are committed afterwards.
void PinOneTile(const Attacker& a) {
  for (int first = 7'000'000; first < 7'000'000 + kHeldPages; first += kBatch) {
    PutTiles(a, first, kOneTile);
    v1::PinRequest request;
    request.set_keyspace(a.session.keyspace().keyspace());
    request.set_keys(TestClient::Keys(first, kBatch));
    request.set_ttl_ms(24 * 3600 * 1000);
    v1::PinResponse response;
    a.stub.Pin(a.Context(), request, &response);
  }
  for (int first = 7'000'000; first < 7'000'000 + kHeldPages; first += kBatch) {
    PutTiles(a, first, kAllTiles);
  }
}

void OpenSessions(const Attacker& a) {
  const auto& limits = a.crumbd.options().sessions;
  for (int i = 0; i < 2 * limits.sessions_max; ++i) {
    a.attack.kept.push_back(a.crumbd.Open("a", /*staging_bytes=*/1 << 20));
  }
}

void Watch(const Attacker& a) {
  for (int i = 0; i < 2 * a.crumbd.options().limits.watchers_max; ++i) {
    auto request = std::make_shared<v1::WatchEventsRequest>();
    request->set_keyspace(a.session.keyspace().keyspace());
    request->set_snapshot(true);
    a.attack.kept.push_back(std::shared_ptr(a.stub.WatchEvents(a.Context(), *request)));
  }
}

// Sessions whose streams are not read, and changes of the states of many keyspaces, each of which
// is a notice for every session.
void UnreadNotices(const Attacker& a) {
  constexpr int kSessions = 64;
  constexpr int kKeyspaces = 31;
  constexpr int kChanges =
      20;  // changes of each keyspace: the first ones fill the connection's windows
  const auto stub = std::shared_ptr(a.crumbd.NewStub());
  a.attack.kept.push_back(stub);
  for (int i = 0; i < kSessions; ++i) {
    const auto session = std::shared_ptr(a.crumbd.Open("a", /*staging_bytes=*/1 << 16));
    if (!session->welcome().error().empty()) break;
    a.attack.contexts.push_back(session->Context());
    auto stream = std::shared_ptr(stub->Session(a.attack.contexts.back().get()));
    a.attack.kept.insert(a.attack.kept.end(), {session, stream});
  }
  const std::vector<std::string> keyspaces = OpenKeyspaces(a, kKeyspaces);
  v1::SetKeyspaceStateRequest request;
  request.set_state(v1::KEYSPACE_STATE_ACTIVE);
  request.set_who("a");
  request.set_reason(std::string(512, 'r'));
  for (int change = 0; change < kChanges; ++change) {
    for (const std::string& keyspace : keyspaces) {
      request.set_keyspace(keyspace);
      v1::SetKeyspaceStateResponse response;
      a.stub.SetKeyspaceState(a.Context(), request, &response);
    }
  }
}

// Few places, so that the calls of the threads above do not fit.
void SmallQueues(Options& options) {
  options.limits.control_queue = 4;
  options.limits.commit_queue = 4;
  options.limits.commit_threads = 1;
}

// Deletes of many keys, which the control thread looks for one by one.
void FloodControl(const Attacker& a) {
  v1::DeleteRequest request;
  request.set_keyspace(a.session.keyspace().keyspace());
  request.set_keys(TestClient::Keys(1'000'000, 4'096));
  a.attack.kept.push_back(
      std::make_shared<Flood>(kFloodThreads, [request, stub = std::shared_ptr(a.crumbd.NewStub())] {
        v1::DeleteResponse response;
        stub->Delete(TwoTenants::Context("a").get(), request, &response);
      }));
}

// Commits of many reserved pieces, each of which must be looked at and refused: nothing was written
// there.
void FloodCommits(const Attacker& a) {
  constexpr int kPieces = 2'048;
  const auto session = std::shared_ptr(
      a.crumbd.Open("a", /*staging_bytes=*/uint64_t{512} * kPieces * (kFloodThreads + 1)));
  ASSERT_TRUE(session->welcome().error().empty()) << session->welcome().error();
  const std::string keyspace = a.session.keyspace().keyspace();
  a.attack.kept.push_back(session);
  a.attack.kept.push_back(std::make_shared<Flood>(kFloodThreads, [session, keyspace] {
    v1::ReserveRequest reserve;
    reserve.set_count(kPieces);
    reserve.set_fragment_bytes(512);
    v1::ReserveResponse reserved;
    session->stub().Reserve(session->Context().get(), reserve, &reserved);
    v1::CommitRequest commit;
    commit.set_keyspace(keyspace);
    for (const uint64_t offset : reserved.offsets()) {
      commit.add_offsets(offset);
      commit.add_header_offsets(0);
    }
    v1::CommitResponse response;
    session->stub().Commit(session->Context().get(), commit, &response);
  }));
}

// Connections of crumbd.fd.sock that never say hello.
void SilentHandshakes(const Attacker& a) {
  for (int i = 0; i < 2 * a.crumbd.options().sessions.handshakes_max; ++i) {
    auto socket = ConnectFdChannel(a.crumbd.options().listen.fd_socket);
    if (socket.ok()) a.attack.kept.push_back(std::make_shared<UniqueFd>(*std::move(socket)));
  }
}

// Connections of gRPC, without a token, from an address of its own.
void OpenConnections(const Attacker& a) {
  const auto connections = std::make_shared<RawConnections>();
  const int port = PortOfAddress(a.crumbd.Tcp());
  const auto most = static_cast<size_t>(a.crumbd.options().limits.connections_max);
  for (size_t i = 0; i < 2 * most; ++i) connections->OpenTcp("127.0.0.2", port);
  EXPECT_TRUE(Eventually([&] { return connections->Open() <= most / 2; }));
  a.attack.kept.push_back(connections);
}

// Messages that never end, without a token, over two connections.
void UnfinishedMessages(const Attacker& a) {
  constexpr int kCalls = 100;
  constexpr uint32_t kMessageBytes = (4 << 20) - 1;
  uint64_t sent = 0;
  for (int i = 0; i < 2; ++i) {
    const auto calls = std::make_shared<UnfinishedCalls>(a.crumbd.options().listen.unix_socket,
                                                         kCalls, kMessageBytes);
    calls->Push(/*quiet_ms=*/100);
    sent += calls->sent_bytes();
    a.attack.kept.push_back(calls);
  }
  EXPECT_GT(sent, a.crumbd.options().limits.receive_bytes_max.value) << "more than the quota";
  EXPECT_LT(sent, uint64_t{2} * kCalls * kMessageBytes) << "crumbd stopped reading, or ended calls";
}

// A session of tenant a that requests device pools.
class PoolCaller {
 public:
  explicit PoolCaller(const TwoTenants& crumbd)
      : socket_(ConnectFdChannel(crumbd.options().listen.fd_socket).value()) {
    v1::SessionHello hello;
    hello.set_protocol_version(1);
    hello.set_process_name("pools");
    hello.set_tenant_token(TwoTenants::Token("a"));
    const UniqueFd pidfd = OwnPidfd();
    const int fds[] = {pidfd.get()};
    EXPECT_TRUE(SendFdMessage(socket_.get(), hello.SerializeAsString(), fds).ok());
    v1::SessionWelcome welcome;
    const auto message = ReceiveFdMessage(socket_.get());
    EXPECT_TRUE(message.ok() && welcome.ParseFromString(message->bytes) &&
                welcome.error().empty() && welcome.device_pools())
        << welcome.error();
  }

  // Joins a new pool, of a device of its own. Returns the pool's id; empty if it is refused.
  std::string Join(uint64_t slot_bytes, uint64_t handle_bytes) {
    static std::atomic<int> devices{0};
    v1::PoolRequest request;
    std::string id(16, 'd');
    id.replace(0, 4, std::to_string(1000 + devices.fetch_add(1)));
    request.mutable_join()->set_device(id);
    request.mutable_join()->set_slot_bytes(slot_bytes);
    request.mutable_join()->set_handle_bytes(handle_bytes);
    return Call(request, {}).pool();
  }
  // Offers handles until one is refused.
  void OfferAll(const std::string& pool) {
    const UniqueFd handle = CreateRoster().value();  // any memory file
    const int fds[] = {handle.get()};
    v1::PoolRequest request;
    request.mutable_offer()->set_pool(pool);
    uint32_t code = 0;
    while (code == 0) code = Call(request, fds).code();
    EXPECT_EQ(code, static_cast<uint32_t>(absl::StatusCode::kResourceExhausted));
  }

 private:
  v1::PoolResponse Call(const v1::PoolRequest& request, std::span<const int> fds) {
    v1::PoolResponse reply;
    reply.set_code(static_cast<uint32_t>(absl::StatusCode::kUnavailable));
    if (!SendFdMessage(socket_.get(), request.SerializeAsString(), fds).ok()) return reply;
    const auto message = ReceiveFdMessage(socket_.get());
    EXPECT_TRUE(message.ok() && reply.ParseFromString(message->bytes)) << message.status();
    return reply;
  }

  UniqueFd socket_;
};

void JoinPools(const Attacker& a) {
  const auto caller = std::make_shared<PoolCaller>(a.crumbd);
  for (int i = 0; i < 2 * a.crumbd.options().device_pools.pools_max; ++i) {
    caller->Join(4096, 4096);
  }
  a.attack.kept.push_back(caller);
}

void OfferHandles(const Attacker& a) {
  const auto caller = std::make_shared<PoolCaller>(a.crumbd);
  const std::string pool = caller->Join(4096, 4096);
  ASSERT_FALSE(pool.empty());
  caller->OfferAll(pool);
  a.attack.kept.push_back(caller);
}

// Handles of many slots each.
void OfferSlots(const Attacker& a) {
  const auto caller = std::make_shared<PoolCaller>(a.crumbd);
  const std::string pool = caller->Join(4096, 4096 * 1024);
  ASSERT_FALSE(pool.empty());
  caller->OfferAll(pool);
  a.attack.kept.push_back(caller);
}

std::string Rejected(const std::string& reason) {
  return "crumb_rejected_total{reason=\"" + reason + "\"}";
}

std::vector<BudgetRow> RowsWithoutSsd() {
  return {
      {"requests", Rejected("requests"), SilentPuts,
       [](Options& options) {
         options.limits.requests_max = 256;
         options.limits.put_streams = 512;
         options.limits.streams_per_connection = 2048;
       }},
      {"put_streams", Rejected("put_streams"), SilentPuts},
      {"get_streams", Rejected("get_streams"), UnreadGets},
      {"watchers", Rejected("watchers"), Watch},
      {"pins", Rejected("held_memory"), PinEverything},
      {"leases", Rejected("held_memory"), LeaseEverything},
      {"deleted_leases", Rejected("held_memory"), LeaseAndDelete},
      {"deleted_gets", Rejected("held_memory"), GetAndDelete},
      {"one_tile_leases", Rejected("held_memory"), LeaseOneTile},
      {"one_tile_pins", "crumb_pages_refused_total{reason=\"no_room\"}", PinOneTile},
      {"keyspaces", Rejected("keyspaces"), OpenAllKeyspaces},
      {"sessions", Rejected("sessions"), OpenSessions},
      {"engines", Rejected("sessions"), OpenSessions,
       [](Options& options) {
         options.sessions.sessions_max = 64;
         options.sessions.engines_max = 8;
       }},
      {"staging", Rejected("staging"), OpenSessions,
       [](Options& options) { options.sessions.staging_total_bytes_max = ByteSize{12 << 20}; }},
      {"handshakes", "crumb_hellos_refused_total", SilentHandshakes,
       [](Options& options) {
         options.sessions.handshakes_max = 8;
         options.sessions.hello_grace = std::chrono::milliseconds(50);
       }},
      {"notices", "crumb_notices_dropped_total", UnreadNotices,
       [](Options& options) {
         options.sessions.sessions_max = 128;
         options.sessions.engines_max = 128;
         options.limits.notice_bytes_max = ByteSize{1 << 20};
       }},
      {"commit_queue", Rejected("commit_queue"), FloodCommits, SmallQueues},
      {"control_queue", Rejected("control_queue"), FloodControl, SmallQueues},
      {"connections", Rejected("connections"), OpenConnections,
       [](Options& options) {
         options.listen.tcp = "127.0.0.1:0";
         options.limits.connections_max = 64;
       }},
      // The limit shows in the number of descriptors that the attacker could send.
      {"receive_bytes", "", UnfinishedMessages,
       [](Options& options) { options.limits.receive_bytes_max = ByteSize{64 << 20}; }},
      {"device_pools", Rejected("device_tenant"), JoinPools,
       [](Options& options) { options.device_pools.pools_max = 8; }},
      {"device_handles", Rejected("device_tenant"), OfferHandles,
       [](Options& options) { options.device_pools.descriptors_max = 64; }},
      {"device_slots", Rejected("device_tenant"), OfferSlots,
       [](Options& options) { options.device_pools.slots_max = 64 * 1024; }},
  };
}

}  // namespace

void PrintTo(const BudgetRow& row, std::ostream* out) { *out << row.name; }

const std::vector<BudgetRow>& BudgetRows() {
  static const std::vector<BudgetRow> rows = [] {
    std::vector<BudgetRow> all = RowsWithoutSsd();
    for (const std::vector<BudgetRow>& more :
         {CallBudgetRows(), SsdBudgetRows(), NodeBudgetRows()}) {
      all.insert(all.end(), more.begin(), more.end());
    }
    return all;
  }();
  return rows;
}

}  // namespace crumb::server
