// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "server/daemon/daemon.h"

#include <signal.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <fstream>
#include <limits>
#include <thread>

#include "gmock/gmock.h"
#include "grpcpp/health_check_service_interface.h"
#include "gtest/gtest.h"
#include "httplib.h"
#include "tests/common/temporary_folder.h"
#include "tests/server/hostile_descriptors.h"
#include "tests/server/test_client.h"

namespace crumb::server {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

Options OptionsIn(const std::string& folder) {
  Options options;
  options.listen.socket_dir = folder;
  options.listen.tcp = "127.0.0.1:0";
  options.admin.listen = "127.0.0.1:0";
  options.store.host.bytes_max = ByteSize{32 << 20};
  options.store.host.slab_bytes = ByteSize{16 << 20};
  options.store.ssd.path = folder + "/data";
  options.store.ssd.bytes_max = ByteSize{128 << 20};
  options.log.severity = "error";
  options.Complete();
  return options;
}

class DaemonTest : public testing::Test {
 protected:
  DaemonTest() { Start(); }

  void Start() {
    daemon_ = Daemon::Start(options_).value();
    places_ = daemon_->endpoints();
  }
  void Restart() {
    daemon_.reset();
    Start();
  }

  std::unique_ptr<TestClient> Connect(uint64_t staging_bytes = 1 << 20) const {
    auto client = std::make_unique<TestClient>(places_.fd_socket, "unix:" + places_.unix_socket,
                                               staging_bytes);
    EXPECT_TRUE(client->OpenKeyspace().ok());
    return client;
  }
  std::string Http(const std::string& path, int* status = nullptr) const {
    httplib::Client client("http://" + places_.admin);
    const auto result = client.Get(path);
    if (!result) return "no response";
    if (status != nullptr) *status = result->status;
    return result->body;
  }
  // The value of one series of /metrics.
  double Series(const std::string& name) const {
    const std::string text = Http("/metrics");
    const size_t at = text.find("\n" + name + " ");
    EXPECT_NE(at, std::string::npos) << name;
    return at == std::string::npos ? -1 : std::stod(text.substr(at + name.size() + 2));
  }

  // Waits until a series has a value: a call's end may be seen before all is given back.
  bool Becomes(const std::string& name, double value) const {
    const TimePoint deadline = Clock::Real().Now() + std::chrono::seconds(10);
    while (Series(name) != value) {
      if (Clock::Real().Now() > deadline) return false;
    }
    return true;
  }

  TemporaryFolder folder_;
  Options options_ = OptionsIn(folder_.path());
  std::unique_ptr<Daemon> daemon_;
  Daemon::Endpoints places_;
};

TEST_F(DaemonTest, APageGoesInOverTheSessionsOwnSocket) {
  const auto writer = Connect();
  ASSERT_TRUE(writer->welcome().staging_socket());
  EXPECT_FALSE(Connect(0)->welcome().staging_socket());
  const std::vector<std::byte> page = writer->Fragment(TestClient::Key(1), 5);
  v1::SocketCall call;
  call.set_request(1);
  call.mutable_reserve()->set_count(1);
  call.mutable_reserve()->set_fragment_bytes(page.size());
  const v1::SocketResponse reserved = writer->CallOverSocket(call);
  ASSERT_EQ(reserved.reserve().offsets_size(), 1);
  const uint64_t offset = reserved.reserve().offsets(0);
  std::copy(page.begin(), page.end(), writer->staging().data() + offset);
  call.set_request(2);
  call.mutable_commit()->set_keyspace(writer->keyspace().keyspace());
  call.mutable_commit()->add_offsets(offset);
  call.mutable_commit()->add_header_offsets(writer->tiles_bytes());
  EXPECT_THAT(writer->CallOverSocket(call).commit().outcomes(),
              ElementsAre(v1::COMMIT_OUTCOME_STORED));
  v1::AcquireResponse found;
  ASSERT_TRUE(Connect(0)->Acquire(TestClient::Keys(1, 1), &found).ok());
  EXPECT_EQ(found.hit_pages(), 1u);
}

TEST_F(DaemonTest, APageGoesInThroughStagingAndIsReadInPlace) {
  const auto writer = Connect();
  const auto reader = Connect(0);
  std::vector<std::vector<std::byte>> pages;
  for (int i = 0; i < 10; ++i) {
    pages.push_back(writer->Fragment(TestClient::Key(i), static_cast<uint8_t>(i + 1)));
    v1::CommitResponse committed;
    ASSERT_TRUE(writer->Commit(pages.back(), &committed).ok());
    ASSERT_THAT(committed.outcomes(), ElementsAre(v1::COMMIT_OUTCOME_STORED));
  }
  v1::AcquireResponse found;
  ASSERT_TRUE(reader->Acquire(TestClient::Keys(0, 12), &found).ok());
  ASSERT_EQ(found.hit_pages(), 10u);
  EXPECT_EQ(found.miss_reason(), v1::MISS_REASON_ABSENT);
  for (int i = 0; i < 10; ++i) {
    const auto bytes = reader->Mapped(found.fragments(), i);
    EXPECT_TRUE(std::equal(bytes.begin(), bytes.end(), pages[static_cast<size_t>(i)].begin()));
  }
  EXPECT_EQ(Series("crumb_leases"), 1);
  EXPECT_TRUE(reader->Release(found.lease()).ok());
  EXPECT_TRUE(Becomes("crumb_leases", 0));
}

TEST_F(DaemonTest, PutAndGetOverTcpNeedNoSession) {
  TestClient client(places_.fd_socket, places_.tcp);
  ASSERT_TRUE(client.OpenKeyspace().ok());
  std::vector<std::vector<std::byte>> pages;
  for (int i = 0; i < 20; ++i) {
    pages.push_back(client.Fragment(TestClient::Key(i), static_cast<uint8_t>(i)));
  }
  pages[7][5] ^= std::byte{1};  // one is damaged
  v1::PutResponse put;
  ASSERT_TRUE(client.Put(pages, &put).ok());
  ASSERT_EQ(put.outcomes_size(), 20);
  for (int i = 0; i < 20; ++i) {
    EXPECT_EQ(put.outcomes(i), i == 7 ? v1::COMMIT_OUTCOME_REFUSED : v1::COMMIT_OUTCOME_STORED);
  }
  EXPECT_THAT(put.first_error(), HasSubstr("DATA_LOSS"));
  std::vector<std::vector<std::byte>> read;
  v1::MissReason reason = v1::MISS_REASON_UNSPECIFIED;
  ASSERT_TRUE(client.Get(TestClient::Keys(0, 20), &read, &reason).ok());
  pages.resize(7);
  EXPECT_EQ(read, pages);
  EXPECT_EQ(reason, v1::MISS_REASON_ABSENT);
  EXPECT_TRUE(Becomes("crumb_leases", 0));
}

TEST_F(DaemonTest, PagesKeyspacesAndGenerationsOutliveARestart) {
  std::string keyspace;
  {
    const auto client = Connect();
    keyspace = client->keyspace().keyspace();
    for (int i = 0; i < 5; ++i) {
      v1::CommitResponse committed;
      ASSERT_TRUE(client->Commit(client->Fragment(TestClient::Key(i), 3), &committed).ok());
    }
    v1::FlushResponse flushed;
    ASSERT_TRUE(client->stub().Flush(client->Context().get(), {}, &flushed).ok());
    EXPECT_GE(flushed.durable_pages(), 5u);
  }
  Restart();
  {
    const auto client = Connect();
    EXPECT_EQ(client->keyspace().keyspace(), keyspace);
    v1::AcquireResponse found;
    ASSERT_TRUE(client->Acquire(TestClient::Keys(0, 5), &found).ok());
    EXPECT_EQ(found.hit_pages(), 5u);
    EXPECT_EQ(found.page_tiers(0), v1::TIER_SSD);
    EXPECT_TRUE(client->Release(found.lease()).ok());
    v1::DropKeyspaceRequest drop;
    drop.set_keyspace(keyspace);
    v1::DropKeyspaceResponse dropped;
    ASSERT_TRUE(client->stub().DropKeyspace(client->Context().get(), drop, &dropped).ok());
    EXPECT_EQ(dropped.generation(), 2u);
    v1::SetKeyspaceStateRequest state;
    state.set_keyspace(keyspace);
    state.set_state(v1::KEYSPACE_STATE_BF16);
    state.set_who("test");
    state.set_reason("error too large");
    v1::SetKeyspaceStateResponse done;
    ASSERT_TRUE(client->stub().SetKeyspaceState(client->Context().get(), state, &done).ok());
  }
  Restart();
  const auto client = Connect();
  EXPECT_EQ(client->keyspace().generation(), 2u);
  EXPECT_EQ(client->keyspace().state(), v1::KEYSPACE_STATE_BF16);
  v1::AcquireResponse found;
  ASSERT_TRUE(client->Acquire(TestClient::Keys(0, 5), &found).ok());
  EXPECT_EQ(found.hit_pages(), 0u);
  EXPECT_EQ(found.miss_reason(), v1::MISS_REASON_QUALITY);
  EXPECT_THAT(Http("/status.json"), HasSubstr("error too large"));
}

TEST_F(DaemonTest, CallsWithoutSessionAreUnauthenticated) {
  const auto client = Connect();
  for (const char* token :
       {"", "00", "00000000000000000000000000000000", "zz000000000000000000000000000000"}) {
    grpc::ClientContext context;
    if (*token != '\0') context.AddMetadata("crumb-session", token);
    v1::AcquireRequest request;
    request.set_keyspace(client->keyspace().keyspace());
    request.set_keys(TestClient::Keys(0, 1));
    v1::AcquireResponse response;
    EXPECT_EQ(client->stub().Acquire(&context, request, &response).error_code(),
              grpc::StatusCode::UNAUTHENTICATED);
  }
  grpc::ClientContext context;
  const auto stream = client->stub().Session(&context);
  v1::SessionResponse response;
  EXPECT_FALSE(stream->Read(&response));
  EXPECT_EQ(stream->Finish().error_code(), grpc::StatusCode::UNAUTHENTICATED);
}

TEST_F(DaemonTest, AHundredThousandKeysAreAnErrorNamingTheBound) {
  const auto client = Connect();
  v1::LookupRequest request;
  request.set_keyspace(client->keyspace().keyspace());
  request.set_keys(TestClient::Keys(0, 100'000));
  v1::LookupResponse response;
  const grpc::Status status = client->stub().Lookup(client->Context().get(), request, &response);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_THAT(status.error_message(), HasSubstr("16384"));
  request.set_keys(TestClient::Keys(0, 16'384));
  EXPECT_TRUE(client->stub().Lookup(client->Context().get(), request, &response).ok());
}

TEST_F(DaemonTest, EveryOtherCallResponds) {
  const auto client = Connect();
  v1::CommitResponse committed;
  ASSERT_TRUE(client->Commit(client->Fragment(TestClient::Key(1), 3), &committed).ok());
  const std::string keyspace = client->keyspace().keyspace();
  const auto fill = [&](auto& request) {
    request.set_keyspace(keyspace);
    request.set_keys(TestClient::Keys(1, 1));
  };
  v1::PinRequest pin;
  fill(pin);
  v1::PinResponse pinned;
  EXPECT_EQ(client->stub().Pin(client->Context().get(), pin, &pinned).error_code(),
            grpc::StatusCode::INVALID_ARGUMENT);  // no time
  pin.set_ttl_ms(25 * 3600 * 1000);
  EXPECT_EQ(client->stub().Pin(client->Context().get(), pin, &pinned).error_code(),
            grpc::StatusCode::INVALID_ARGUMENT)
      << "longer than limits.pin_max";
  pin.set_ttl_ms(60'000);
  ASSERT_TRUE(client->stub().Pin(client->Context().get(), pin, &pinned).ok());
  EXPECT_EQ(pinned.pinned_pages(), 1u);
  v1::UnpinRequest unpin;
  fill(unpin);
  v1::UnpinResponse unpinned;
  ASSERT_TRUE(client->stub().Unpin(client->Context().get(), unpin, &unpinned).ok());
  EXPECT_EQ(unpinned.unpinned_pages(), 1u);
  v1::PrefetchRequest prefetch;
  fill(prefetch);
  v1::PrefetchResponse prefetched;
  EXPECT_TRUE(client->stub().Prefetch(client->Context().get(), prefetch, &prefetched).ok());
  v1::DeleteRequest remove;
  fill(remove);
  v1::DeleteResponse removed;
  ASSERT_TRUE(client->stub().Delete(client->Context().get(), remove, &removed).ok());
  EXPECT_EQ(removed.deleted_pages(), 1u);
  v1::StatsResponse stats;
  ASSERT_TRUE(client->stub().Stats(client->Context().get(), {}, &stats).ok());
  EXPECT_EQ(stats.sessions(), 1u);
  EXPECT_EQ(stats.tiers_size(), 3);
  EXPECT_EQ(stats.keyspaces(0).model(), "tiny");
  v1::ListNodesResponse nodes;
  ASSERT_TRUE(client->stub().ListNodes(client->Context().get(), {}, &nodes).ok());
  EXPECT_EQ(nodes.nodes(0).id(), stats.node_id());
  EXPECT_TRUE(nodes.nodes(0).self());
}

TEST_F(DaemonTest, OpenKeyspaceChecksWhatItIsGiven) {
  const auto client = Connect();
  const auto open = [&](const std::function<void(v1::OpenKeyspaceRequest&)>& change) {
    v1::OpenKeyspaceRequest request;
    (*request.mutable_fields())["model"] = "other";
    request.set_layers(2);
    request.set_kv_heads(2);
    request.set_head_dim(128);
    request.set_group_size(128);
    change(request);
    v1::OpenKeyspaceResponse response;
    const grpc::Status status =
        client->stub().OpenKeyspace(client->Context().get(), request, &response);
    return status.ok() ? "tiles of " + std::to_string(response.int2_tile_bytes()) + " and " +
                             std::to_string(response.bf16_tile_bytes())
                       : status.error_message();
  };
  EXPECT_EQ(open([](auto&) {}), "tiles of 4608 and 32768");
  EXPECT_THAT(open([](auto& request) { request.set_layers(0); }), HasSubstr("layers is 0"));
  EXPECT_THAT(open([](auto& request) { request.set_kv_heads(2000); }), HasSubstr("kv_heads"));
  EXPECT_THAT(open([](auto& request) { request.set_head_dim(96); }), HasSubstr("head_dim is 96"));
  EXPECT_THAT(open([](auto& request) { request.set_group_size(256); }), HasSubstr("group_size"));
  EXPECT_THAT(open([](auto& request) { (*request.mutable_fields())["layers"] = "2"; }),
              HasSubstr("'layers' is set by crumbd"));
  EXPECT_THAT(open([](auto& request) { (*request.mutable_fields())["a=b"] = "2"; }),
              HasSubstr("a=b"));
  EXPECT_THAT(open([](auto& request) { request.set_tenant(std::string(200, 't')); }),
              HasSubstr("tenant"));
}

TEST_F(DaemonTest, WatchersSeeSnapshotAdditionsAndRemovals) {
  const auto client = Connect();
  v1::CommitResponse committed;
  ASSERT_TRUE(client->Commit(client->Fragment(TestClient::Key(1), 3), &committed).ok());
  v1::WatchEventsRequest request;
  request.set_keyspace(client->keyspace().keyspace());
  request.set_snapshot(true);
  const auto context = client->Context();
  const auto stream = client->stub().WatchEvents(context.get(), request);
  v1::WatchEventsResponse event;
  using Event = v1::WatchEventsResponse;
  ASSERT_TRUE(stream->Read(&event));
  // The page comes to the SSD tier when it likes: before, within or behind the snapshot.
  const auto is_first = [&] {
    return event.kind() == Event::KIND_ADDED && event.key() == TestClient::Key(1).view();
  };
  EXPECT_TRUE(is_first());
  while (is_first()) ASSERT_TRUE(stream->Read(&event));
  EXPECT_EQ(event.kind(), Event::KIND_SNAPSHOT_END);
  const uint64_t start = event.sequence();
  ASSERT_TRUE(client->Commit(client->Fragment(TestClient::Key(2), 3), &committed).ok());
  ASSERT_TRUE(stream->Read(&event));
  while (is_first()) ASSERT_TRUE(stream->Read(&event));
  EXPECT_EQ(event.kind(), Event::KIND_ADDED);
  EXPECT_EQ(event.key(), TestClient::Key(2).view());
  EXPECT_GT(event.sequence(), start);
  context->TryCancel();
  while (stream->Read(&event)) {
  }
  EXPECT_EQ(stream->Finish().error_code(), grpc::StatusCode::CANCELLED);
}

TEST_F(DaemonTest, AClientCannotSetCountersToAnything) {
  const auto client = Connect();
  const auto context = client->Context();
  const auto stream = client->stub().Session(context.get());
  v1::SessionRequest counters;
  counters.mutable_counters()->set_used_tokens(uint64_t{1} << 62);
  counters.mutable_counters()->set_scrubbed_pages(1);
  ASSERT_TRUE(stream->Write(counters));
  EXPECT_TRUE(Becomes("crumb_scrubbed_pages_total", 1));  // counted last
  EXPECT_LT(Series("crumb_used_tokens_total"), 1e10);
  context->TryCancel();
  EXPECT_EQ(stream->Finish().error_code(), grpc::StatusCode::CANCELLED);
}

TEST_F(DaemonTest, TheSessionStreamReportsDurabilityAndStatesAndCounts) {
  const auto client = Connect();
  const auto context = client->Context();
  const auto stream = client->stub().Session(context.get());
  v1::SessionRequest counters;
  counters.mutable_counters()->set_used_tokens(640);
  counters.mutable_counters()->set_prefill_tokens_avoided(64);
  for (const float error : {0.35f, 0.45f, -1.0f, std::numeric_limits<float>::infinity()}) {
    v1::SessionRequest::QualitySample& sample = *counters.add_quality();
    sample.set_layer(2);
    sample.set_attention_error(error);
    sample.set_key_error(0.2f);
  }
  counters.add_quality()->set_layer(4'000'000'000);  // counts in the last series
  ASSERT_TRUE(stream->Write(counters));
  v1::SetKeyspaceStateRequest state;
  state.set_keyspace(client->keyspace().keyspace());
  state.set_state(v1::KEYSPACE_STATE_ACTIVE);
  state.set_reason("first");
  v1::SetKeyspaceStateResponse done;
  // The stream is open once a state arrives on it.
  v1::SessionResponse received;
  std::thread teller([&] {
    EXPECT_TRUE(Becomes("crumb_used_tokens_total", 640));
    EXPECT_TRUE(client->stub().SetKeyspaceState(client->Context().get(), state, &done).ok());
  });
  ASSERT_TRUE(stream->Read(&received));
  teller.join();
  EXPECT_EQ(received.keyspace_state().reason(), "first");
  EXPECT_TRUE(Becomes("crumb_quant_error_ratio_count{kind=\"key\"}", 5));  // counted last
  EXPECT_EQ(Series("crumb_prefill_tokens_avoided_total"), 64);
  EXPECT_EQ(Series("crumb_attention_error_count{layer=\"2\"}"), 2);
  EXPECT_NEAR(Series("crumb_attention_error_sum{layer=\"2\"}"), 0.8, 1e-6);
  EXPECT_EQ(Series("crumb_attention_error_count{layer=\"0\"}"), 0);
  EXPECT_EQ(Series("crumb_attention_error_count{layer=\"127\"}"), 1);
  v1::CommitResponse committed;
  ASSERT_TRUE(client->Commit(client->Fragment(TestClient::Key(9), 3), &committed).ok());
  v1::FlushResponse flushed;
  ASSERT_TRUE(client->stub().Flush(client->Context().get(), {}, &flushed).ok());
  ASSERT_TRUE(stream->Read(&received));
  EXPECT_EQ(received.durable().keys(), TestClient::Key(9).view());
  // A second stream of the session is refused; the first goes on.
  const auto second_context = client->Context();
  const auto second = client->stub().Session(second_context.get());
  EXPECT_FALSE(second->Read(&received));
  EXPECT_EQ(second->Finish().error_code(), grpc::StatusCode::FAILED_PRECONDITION);
  stream->WritesDone();
  EXPECT_FALSE(stream->Read(&received));
  EXPECT_TRUE(stream->Finish().ok());
}

TEST_F(DaemonTest, TheAdminPortResponds) {
  int status = 0;
  EXPECT_EQ(Http("/healthz", &status), "ok\n");
  EXPECT_EQ(status, 200);
  EXPECT_EQ(Http("/readyz", &status), "ready\n");
  EXPECT_EQ(status, 200);
  EXPECT_THAT(Http("/"), HasSubstr("/metrics"));
  Http("/nothing", &status);
  EXPECT_EQ(status, 404);
  EXPECT_THAT(Http("/status.json"), HasSubstr("\"node_id\""));
  EXPECT_EQ(Series("crumb_lookup_tokens_total{model=\"other\",tier=\"remote\"}"), 0);
}

TEST_F(DaemonTest, TheTokenLabelsOfMetricsSumToWhatWasRequested) {
  const auto client = Connect();
  v1::CommitResponse committed;
  ASSERT_TRUE(client->Commit(client->Fragment(TestClient::Key(0), 3), &committed).ok());
  v1::AcquireRequest request;
  request.set_keyspace(client->keyspace().keyspace());
  request.set_keys(TestClient::Keys(0, 3));
  request.set_window_tokens(300);
  v1::AcquireResponse found;
  ASSERT_TRUE(client->stub().Acquire(client->Context().get(), request, &found).ok());
  double sum = 0;
  for (const char* tier : {"device", "host", "ssd", "remote", "miss", "window"}) {
    sum += Series(std::string("crumb_lookup_tokens_total{model=\"tiny\",tier=\"") + tier + "\"}");
  }
  EXPECT_EQ(sum, 3 * 64 + 300);
  EXPECT_EQ(Series("crumb_lookup_tokens_total{model=\"tiny\",tier=\"host\"}"), 64);
}

TEST_F(DaemonTest, AnAcquireThatNoCallerWaitsForLeavesNoLease) {
  const auto client = Connect();
  v1::CommitResponse committed;
  ASSERT_TRUE(client->Commit(client->Fragment(TestClient::Key(0), 3), &committed).ok());
  v1::ReleaseRequest give_back;
  for (uint64_t i = 1; i <= 200; ++i) {
    const auto context = client->Context();
    v1::AcquireRequest request;
    request.set_keyspace(client->keyspace().keyspace());
    request.set_keys(TestClient::Keys(0, 1));
    request.set_request(i);
    v1::AcquireResponse response;
    context->set_deadline(std::chrono::system_clock::now() + std::chrono::microseconds(i * 2));
    const grpc::Status status = client->stub().Acquire(context.get(), request, &response);
    if (status.ok()) {
      give_back.add_leases(response.lease());
    } else {
      give_back.add_requests(i);
    }
  }
  v1::ReleaseResponse given_back;
  ASSERT_TRUE(client->stub().Release(client->Context().get(), give_back, &given_back).ok());
  EXPECT_EQ(given_back.unknown(), 0u);
  // A call that was given up may still be on its way: one connection, so not for long.
  for (int i = 0; i < 200 && Series("crumb_leases") != 0; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  EXPECT_TRUE(Becomes("crumb_leases", 0));
}

TEST_F(DaemonTest, ListenersInUseAreNamed) {
  const auto error = [&](const std::function<void(Options&)>& change) {
    TemporaryFolder other;
    Options options = OptionsIn(other.path());
    change(options);
    const auto second = Daemon::Start(options);
    return second.ok() ? "started" : std::string(second.status().message());
  };
  EXPECT_THAT(error([&](Options& options) { options.listen.tcp = places_.tcp; }),
              HasSubstr("listen.tcp " + places_.tcp));
  EXPECT_THAT(error([&](Options& options) { options.admin.listen = places_.admin; }),
              HasSubstr("admin.listen " + places_.admin));
  EXPECT_THAT(error([&](Options& options) { options.listen.unix_socket = places_.unix_socket; }),
              HasSubstr("listens at " + places_.unix_socket));
  EXPECT_THAT(error([&](Options& options) { options.listen.fd_socket = places_.fd_socket; }),
              HasSubstr("listens at " + places_.fd_socket));
  EXPECT_THAT(error([&](Options& options) { options.listen.unix_socket = "/nonexistent/x.sock"; }),
              HasSubstr("/nonexistent/ does not exist"));
  EXPECT_EQ(Http("/readyz"), "ready\n");  // the first goes on
}

// gRPC receives without room for descriptors, which the kernel would then close on its threads.
TEST_F(DaemonTest, TheKernelRefusesDescriptorsForGrpc) {
  constexpr int kPassRights = 83;  // SO_PASSRIGHTS
  const UniqueFd connection(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  int passes = 0;
  socklen_t size = sizeof(passes);
  if (::getsockopt(connection.get(), SOL_SOCKET, kPassRights, &passes, &size) != 0) {
    GTEST_SKIP() << "needs Linux 6.16";
  }
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  places_.unix_socket.copy(address.sun_path, sizeof(address.sun_path) - 1);
  ASSERT_EQ(
      ::connect(connection.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)), 0);
  const int fds[] = {STDIN_FILENO};
  EXPECT_FALSE(SendDescriptors(connection.get(), "PRI * HTTP/2.0", fds));
  EXPECT_EQ(errno, EPERM);
}

TEST_F(DaemonTest, ClosingTheConnectionEndsTheSession) {
  const auto client = Connect();
  EXPECT_EQ(Series("crumb_sessions"), 1);
  client->CloseSocket();
  for (int i = 0; i < 500 && Series("crumb_sessions") != 0; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  EXPECT_EQ(Series("crumb_sessions"), 0);
  v1::AcquireResponse response;
  EXPECT_EQ(client->Acquire(TestClient::Keys(0, 1), &response).error_code(),
            grpc::StatusCode::UNAUTHENTICATED);
}

}  // namespace
}  // namespace crumb::server
