// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
// Callers that make calls and read no response: they use up their limits, lose their calls after a
// time, and delay no other caller.
#include <cstdint>
#include <future>
#include <optional>
#include <string>

#include "gtest/gtest.h"
#include "server/daemon/daemon.h"
#include "tests/common/eventually.h"
#include "tests/common/temporary_folder.h"
#include "tests/server/test_client.h"
#include "tests/server/unfinished_calls.h"

namespace crumb::server {
namespace {

using std::chrono::seconds;

constexpr char kStats[] = "/crumb.v1.CacheService/Stats";
constexpr char kStalled[] = "crumb_stalled_streams_total";
constexpr auto kGrace = seconds(60);
constexpr auto kMuchEarlierThanGrace = seconds(30);

class UnreadResponsesTest : public testing::Test {
 protected:
  UnreadResponsesTest() {
    options_.listen.socket_dir = folder_.path();
    options_.admin.listen = "";
    options_.store.host.bytes_max = ByteSize{16 << 20};
    options_.store.host.slab_bytes = ByteSize{16 << 20};
    options_.store.ssd.path = "";
    options_.log.severity = "off";
    options_.stop_grace = kGrace;
  }

  void Start() {
    options_.Complete();
    daemon_ = Daemon::Start(options_).value();
    client_ = std::make_unique<TestClient>(options_.listen.fd_socket,
                                           "unix:" + options_.listen.unix_socket);
    EXPECT_TRUE(client_->OpenKeyspace().ok());
  }
  // Makes a Stats take a hundred KiB.
  void OpenKeyspaces() {
    for (int i = 0; i < 100; ++i) {
      ASSERT_TRUE(client_->OpenKeyspace(std::to_string(i) + std::string(1000, 'm')).ok());
    }
  }
  // A counter as Stats has it; nothing while calls are refused.
  std::optional<uint64_t> Read(const std::string& counter) {
    v1::StatsResponse stats;
    if (!client_->stub().Stats(client_->Context().get(), {}, &stats).ok()) return std::nullopt;
    return stats.counters().at(counter);
  }
  bool Served() { return Read(kStalled).has_value(); }

  TemporaryFolder folder_;
  Options options_;
  std::unique_ptr<Daemon> daemon_;
  std::unique_ptr<TestClient> client_;
};

TEST_F(UnreadResponsesTest, CallsKeepTheirPlacesUntilTheyAreReadOrStalled) {
  options_.limits.requests_max = 16;
  options_.limits.stream_progress_timeout = seconds(3);
  Start();
  const UnreadCalls calls(options_.listen.unix_socket, kStats, 64);
  ASSERT_TRUE(calls.connected());
  EXPECT_TRUE(Eventually([&] { return !Served(); })) << "all places are taken";
  EXPECT_TRUE(Eventually([&] { return Served(); })) << "the places are free again";
  EXPECT_TRUE(Eventually([&] { return Read(kStalled).value_or(0) >= 1; })) << "they are counted";
}

// The peer reads nothing from its socket, not even that its calls are cancelled.
TEST_F(UnreadResponsesTest, ConnectionsThatAreNotReadEnd) {
  options_.limits.requests_max = 4096;
  options_.limits.stream_progress_timeout = seconds(3);
  Start();
  const UnreadCalls calls(options_.listen.unix_socket, kStats, 1000);
  ASSERT_TRUE(calls.connected());
  EXPECT_TRUE(Eventually([&] { return Read("crumb_stalled_connections_total").value_or(0) >= 1; }))
      << "the connection is ended";
}

TEST_F(UnreadResponsesTest, RoomOfAReserveWhoseResponseIsNotReadComesBack) {
  options_.limits.stream_progress_timeout = seconds(3);
  Start();
  v1::ReserveRequest request;
  request.set_count(1);
  request.set_fragment_bytes(client_->staging().size());
  const UnreadCalls calls(options_.listen.unix_socket, "/crumb.v1.CacheService/Reserve", 1,
                          request.SerializeAsString(), client_->token());
  ASSERT_TRUE(calls.connected());
  const auto reservations = [&] {
    v1::StatsResponse stats;
    EXPECT_TRUE(client_->stub().Stats(client_->Context().get(), {}, &stats).ok());
    return stats.reservations();
  };
  EXPECT_TRUE(Eventually([&] { return reservations() == 1; })) << "the room is taken";
  EXPECT_TRUE(Eventually([&] { return reservations() == 0; })) << "the room is free again";
}

TEST_F(UnreadResponsesTest, TheirBytesAreBounded) {
  options_.limits.response_bytes_max = ByteSize{4 << 20};
  options_.limits.stream_progress_timeout = seconds(3);
  Start();
  OpenKeyspaces();
  const UnreadCalls calls(options_.listen.unix_socket, kStats, 200);  // 20 MB of responses
  ASSERT_TRUE(calls.connected());
  EXPECT_TRUE(Eventually([&] { return !Served(); })) << "their room is taken";
  EXPECT_TRUE(Eventually([&] { return Served(); })) << "their room is free again";
}

TEST_F(UnreadResponsesTest, NoCallerHoldsUpAStop) {
  Start();
  OpenKeyspaces();
  UnreadCalls calls(options_.listen.unix_socket, kStats, 500);
  // Reflection and health are gRPC's own.
  UnreadCalls reflection(options_.listen.unix_socket,
                         "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", 10);
  UnreadCalls health(options_.listen.unix_socket, "/grpc.health.v1.Health/Watch", 10);
  ASSERT_TRUE(calls.connected() && reflection.connected() && health.connected());
  ASSERT_TRUE(Served());
  auto stopped = std::async(std::launch::async, [&] { return daemon_->Stop(); });
  const bool in_time = stopped.wait_for(kMuchEarlierThanGrace) == std::future_status::ready;
  EXPECT_TRUE(in_time) << "Stop waits for a caller";
  calls.Close();
  reflection.Close();
  health.Close();
  EXPECT_TRUE(stopped.get().ok());
}

}  // namespace
}  // namespace crumb::server
