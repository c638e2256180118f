// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
// A caller who opens connections of gRPC until they are refused keeps no other from being served.
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <regex>
#include <sstream>

#include "grpcpp/grpcpp.h"
#include "gtest/gtest.h"
#include "server/daemon/daemon.h"
#include "tests/common/eventually.h"
#include "tests/common/temporary_folder.h"
#include "tests/server/raw_connections.h"
#include "tests/server/series.h"
#include "tests/server/test_client.h"

namespace crumb::server {
namespace {

constexpr int kConnectionsMax = 32;

class ConnectionsTest : public testing::Test {
 protected:
  ConnectionsTest() {
    options_.listen.socket_dir = folder_.path();
    options_.listen.tcp = "127.0.0.1:0";
    options_.admin.listen = "127.0.0.1:0";
    options_.store.host.bytes_max = ByteSize{16 << 20};
    options_.store.host.slab_bytes = ByteSize{16 << 20};
    options_.store.ssd.path = "";
    options_.limits.connections_max = kConnectionsMax;
    // Silent connections stay, so that only the bound closes any.
    options_.limits.handshake_timeout = std::chrono::minutes(10);
    options_.limits.keepalive_interval = std::chrono::minutes(10);
    options_.log.severity = "off";
    options_.Complete();
  }
  void Start() {
    daemon_ = Daemon::Start(options_).value();
    port_ = PortOfAddress(daemon_->endpoints().tcp);
  }
  std::string Local() const { return "unix:" + options_.listen.unix_socket; }
  std::string Remote() const { return "127.0.0.1:" + std::to_string(port_); }

  // A Stats over a connection of its own.
  static grpc::Status Stats(const std::string& target) {
    grpc::ChannelArguments arguments;
    arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
    const auto stub = v1::CacheService::NewStub(
        grpc::CreateCustomChannel(target, grpc::InsecureChannelCredentials(), arguments));
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(20));
    v1::StatsResponse stats;
    return stub->Stats(&context, {}, &stats);
  }
  double Rejected() const {
    return SeriesOf(daemon_->endpoints().admin, "crumb_rejected_total{reason=\"connections\"}");
  }

  TemporaryFolder folder_;
  Options options_;
  std::unique_ptr<Daemon> daemon_;
  int port_ = 0;
};

TEST_F(ConnectionsTest, OneAddressHasHalfAtMost) {
  Start();
  RawConnections attack;
  for (int i = 0; i < 4 * kConnectionsMax; ++i) attack.OpenTcp("127.0.0.2", port_);
  EXPECT_TRUE(Eventually([&] { return attack.Open() <= kConnectionsMax / 2; }))
      << attack.Open() << " are open";
  EXPECT_GE(attack.Open(), static_cast<size_t>(kConnectionsMax / 2 - 1)) << "half may be";
  EXPECT_GT(Rejected(), 0);
  for (const std::string& target : {Local(), Remote()}) {
    const grpc::Status served = Stats(target);
    EXPECT_TRUE(served.ok()) << target << ": " << served.error_message();
  }
  // The places come back when the attacker goes: as many can be opened again.
  attack.CloseAll();
  EXPECT_TRUE(Eventually([&] {
    RawConnections again;
    for (int i = 0; i < kConnectionsMax / 2; ++i) again.OpenTcp("127.0.0.2", port_);
    return Stats(Remote()).ok() && again.Open() == kConnectionsMax / 2;
  }));
}

TEST_F(ConnectionsTest, OneUserHasHalfAtMost) {
  Start();
  RawConnections attack;
  for (int i = 0; i < 4 * kConnectionsMax; ++i) attack.OpenUnix(options_.listen.unix_socket);
  EXPECT_TRUE(Eventually([&] { return attack.Open() <= kConnectionsMax / 2; }))
      << attack.Open() << " are open";
  const grpc::Status served = Stats(Remote());
  EXPECT_TRUE(served.ok()) << served.error_message();
}

// Many addresses together: no more than the total, and a connection that stands goes on.
TEST_F(ConnectionsTest, TheTotalHolds) {
  Start();
  const auto stub =
      v1::CacheService::NewStub(grpc::CreateChannel(Local(), grpc::InsecureChannelCredentials()));
  const auto call = [&] {
    grpc::ClientContext context;
    v1::StatsResponse stats;
    return stub->Stats(&context, {}, &stats);
  };
  ASSERT_TRUE(call().ok());
  RawConnections attack;
  for (int i = 0; i < 4 * kConnectionsMax; ++i) {
    attack.OpenTcp("127.0.0." + std::to_string(2 + i), port_);
  }
  EXPECT_TRUE(Eventually([&] { return attack.Open() < kConnectionsMax; }))
      << attack.Open() << " are open";
  EXPECT_TRUE(call().ok());
}

// crumbd as a process that may open few descriptors, fewer than limits.connections_max.
class FewDescriptorsTest : public testing::Test {
 protected:
  static constexpr rlim_t kDescriptors = 1200;

  FewDescriptorsTest() {
    const std::string config = folder_.path() + "/crumbd.yaml";
    std::ofstream(config) << "listen:\n  socket_dir: " << folder_.path()
                          << "\n  tcp: 127.0.0.1:0\nadmin:\n  listen: \"\"\nstore:\n  host:\n"
                          << "    bytes_max: 32MiB\n    slab_bytes: 16MiB\n  ssd:\n    path: "
                          << folder_.path() << "/data\n    bytes_max: 64MiB\nlimits:\n"
                          << "  connections_max: 4096\n  handshake_timeout: 10m\n"
                          << "  keepalive_interval: 10m\n"
                          << "log:\n  severity: \"off\"\n";
    std::filesystem::create_directory(folder_.path() + "/data");
    pid_ = ::fork();
    if (pid_ == 0) {
      const rlimit limit{kDescriptors, kDescriptors};
      if (::setrlimit(RLIMIT_NOFILE, &limit) != 0) ::_exit(97);
      ::execl(CRUMBD_PATH, CRUMBD_PATH, "--config", config.c_str(), nullptr);
      ::_exit(98);
    }
    EXPECT_TRUE(Eventually([&] { return std::ifstream(endpoints_).peek() == '{'; }));
    std::stringstream text;
    text << std::ifstream(endpoints_).rdbuf();
    std::smatch found;
    const std::string content = text.str();
    EXPECT_TRUE(std::regex_search(content, found, std::regex("127\\.0\\.0\\.1:(\\d+)")));
    port_ = std::stoi(found[1]);
  }
  ~FewDescriptorsTest() override {
    ::kill(pid_, SIGKILL);
    ::waitpid(pid_, nullptr, 0);
  }

  TemporaryFolder folder_;
  const std::string endpoints_ = folder_.path() + "/crumbd.endpoints.json";
  pid_t pid_ = 0;
  int port_ = 0;
};

TEST_F(FewDescriptorsTest, OthersAreServedWhenACallerTakesAllConnectionsItGets) {
  RawConnections attack;
  for (rlim_t i = 0; i < 2 * kDescriptors; ++i) attack.OpenTcp("127.0.0.2", port_);
  // Half of the descriptors are for connections, and half of these for one address.
  EXPECT_TRUE(Eventually([&] { return attack.Open() <= kDescriptors / 4; }))
      << attack.Open() << " are open";
  // A session takes six descriptors, a connection one; pages on SSD take files.
  TestClient honest(folder_.path() + "/crumbd.fd.sock", "unix:" + folder_.path() + "/crumbd.sock");
  ASSERT_EQ(honest.welcome().error(), "");
  ASSERT_TRUE(honest.OpenKeyspace().ok());
  v1::CommitResponse committed;
  const grpc::Status stored = honest.Commit(honest.Fragment(TestClient::Key(1), 1), &committed);
  EXPECT_TRUE(stored.ok()) << stored.error_message();
  v1::FlushResponse flushed;
  const grpc::Status durable = honest.stub().Flush(honest.Context().get(), {}, &flushed);
  EXPECT_TRUE(durable.ok()) << durable.error_message();
}

}  // namespace
}  // namespace crumb::server
