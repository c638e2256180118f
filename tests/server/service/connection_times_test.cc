// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
// Connections of gRPC whose handshakes do not end, that are not used or whose peers are gone are
// closed, and no others; calls beyond the bound of one connection wait.
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "grpcpp/grpcpp.h"
#include "gtest/gtest.h"
#include "server/daemon/daemon.h"
#include "tests/common/eventually.h"
#include "tests/common/temporary_folder.h"
#include "tests/server/raw_connections.h"
#include "tests/server/test_client.h"

namespace crumb::server {
namespace {

using std::chrono::milliseconds;

constexpr Duration kLong = std::chrono::minutes(10);
constexpr Duration kShort = milliseconds(500);
// The bytes that begin HTTP/2: the preface and a SETTINGS frame without settings.
const std::string kGreeting =
    std::string("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n") + std::string("\0\0\0\4\0\0\0\0\0", 9);

class ConnectionTimesTest : public testing::Test {
 protected:
  // Starts crumbd with times that none of its connections reaches, but for those that are changed.
  void Start(const std::function<void(Limits&)>& change) {
    options_.listen.socket_dir = folder_.path();
    options_.listen.tcp = "127.0.0.1:0";
    options_.admin.listen = "";
    options_.store.host.bytes_max = ByteSize{16 << 20};
    options_.store.host.slab_bytes = ByteSize{16 << 20};
    options_.store.ssd.path = "";
    options_.limits.handshake_timeout = kLong;
    options_.limits.keepalive_interval = kLong;
    options_.limits.idle_connection = kLong;
    options_.log.severity = "off";
    change(options_.limits);
    options_.Complete();
    daemon_ = Daemon::Start(options_).value();
    client_ = std::make_unique<TestClient>(options_.listen.fd_socket, Target());
    ASSERT_TRUE(client_->OpenKeyspace().ok());
  }
  std::string Target() const { return "unix:" + options_.listen.unix_socket; }

  // Opens one connection to each socket, which sends `bytes` and reads until it ends.
  void Connect(RawConnections& connections, const std::string& bytes) const {
    ASSERT_TRUE(connections.OpenUnix(options_.listen.unix_socket));
    ASSERT_TRUE(connections.OpenTcp("127.0.0.2", PortOfAddress(daemon_->endpoints().tcp)));
    for (size_t i = 0; i < connections.size(); ++i) ASSERT_TRUE(connections.Send(i, bytes));
  }

  std::unique_ptr<v1::CacheService::Stub> NewStub() const {
    grpc::ChannelArguments arguments;
    arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
    return v1::CacheService::NewStub(
        grpc::CreateCustomChannel(Target(), grpc::InsecureChannelCredentials(), arguments));
  }

  // A watcher of the keyspace, whose stream goes on until it is ended.
  struct Watcher {
    std::unique_ptr<grpc::ClientContext> context;
    std::unique_ptr<grpc::ClientReader<v1::WatchEventsResponse>> stream;
    bool Read() const {
      v1::WatchEventsResponse event;
      return stream->Read(&event);
    }
    void End() const {
      context->TryCancel();
      stream->Finish();
    }
  };
  Watcher Watch(v1::CacheService::Stub& stub) const {
    Watcher watcher;
    watcher.context = client_->Context();
    v1::WatchEventsRequest request;
    request.set_keyspace(client_->keyspace().keyspace());
    request.set_snapshot(true);
    watcher.stream = stub.WatchEvents(watcher.context.get(), request);
    return watcher;
  }

  TemporaryFolder folder_;
  Options options_;
  std::unique_ptr<Daemon> daemon_;
  std::unique_ptr<TestClient> client_;
};

TEST_F(ConnectionTimesTest, AHandshakeThatDoesNotEndIsCutOff) {
  Start([](Limits& limits) { limits.handshake_timeout = kShort; });
  RawConnections silent;
  Connect(silent, "");
  RawConnections greeting;  // they end their handshakes, and stay
  Connect(greeting, kGreeting);
  EXPECT_EQ(silent.Open(), 2u);
  EXPECT_TRUE(Eventually([&] { return silent.Open() == 0; }));
  EXPECT_EQ(greeting.Open(), 2u);
}

TEST_F(ConnectionTimesTest, AConnectionWithoutCallsIsClosed) {
  Start([](Limits& limits) { limits.idle_connection = kShort; });
  const auto stub = NewStub();
  const Watcher watcher = Watch(*stub);
  ASSERT_TRUE(watcher.Read()) << "the end of the snapshot";
  RawConnections idle;
  Connect(idle, kGreeting);
  EXPECT_EQ(idle.Open(), 2u);
  EXPECT_TRUE(Eventually([&] { return idle.Open() == 0; }));
  std::this_thread::sleep_for(4 * kShort);
  v1::PutResponse stored;
  ASSERT_TRUE(client_->Put({client_->Fragment(TestClient::Key(1), 1)}, &stored).ok())
      << "a client connects again";
  EXPECT_TRUE(watcher.Read()) << "a connection with a call is in use";
  watcher.End();
}

TEST_F(ConnectionTimesTest, AConnectionWhosePeerGivesNoSignOfLifeIsClosed) {
  Start([](Limits& limits) {
    limits.keepalive_interval = kShort;
    limits.keepalive_timeout = kShort;
  });
  const auto stub = NewStub();
  const Watcher watcher = Watch(*stub);
  ASSERT_TRUE(watcher.Read()) << "the end of the snapshot";
  RawConnections gone;  // they greet, and do not respond to pings
  Connect(gone, kGreeting);
  EXPECT_EQ(gone.Open(), 2u);
  EXPECT_TRUE(Eventually([&] { return gone.Open() == 0; }));
  std::this_thread::sleep_for(4 * kShort);
  v1::PutResponse stored;
  ASSERT_TRUE(client_->Put({client_->Fragment(TestClient::Key(1), 1)}, &stored).ok());
  EXPECT_TRUE(watcher.Read()) << "its library responds to pings";
  watcher.End();
}

TEST_F(ConnectionTimesTest, CallsBeyondTheBoundOfAConnectionWait) {
  constexpr size_t kStreams = 4;
  Start([](Limits& limits) { limits.streams_per_connection = kStreams; });
  const auto stub = NewStub();
  std::vector<Watcher> watchers;
  for (size_t i = 0; i < kStreams; ++i) {
    watchers.push_back(Watch(*stub));
    ASSERT_TRUE(watchers.back().Read()) << i;
  }
  const auto stats = [&](v1::CacheService::Stub& of, Duration wait) {
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() +
                         std::chrono::duration_cast<milliseconds>(wait));
    v1::StatsResponse response;
    return of.Stats(&context, {}, &response).error_code();
  };
  EXPECT_EQ(stats(*stub, kShort), grpc::StatusCode::DEADLINE_EXCEEDED) << "one too many";
  EXPECT_EQ(stats(*NewStub(), std::chrono::seconds(20)), grpc::StatusCode::OK)
      << "another connection";
  watchers.back().End();
  watchers.pop_back();
  EXPECT_EQ(stats(*stub, std::chrono::seconds(20)), grpc::StatusCode::OK) << "one has ended";
  for (const Watcher& watcher : watchers) watcher.End();
}

}  // namespace
}  // namespace crumb::server
