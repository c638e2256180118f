// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
// Callers without a token send messages that never end: crumbd's memory stays within a bound, comes
// back when the callers go, and others are served meanwhile.
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <memory>
#include <vector>

#include "common/hex.h"
#include "common/sha256.h"
#include "crumb/v1/cache_service.grpc.pb.h"
#include "grpcpp/grpcpp.h"
#include "gtest/gtest.h"
#include "tests/common/eventually.h"
#include "tests/common/temporary_folder.h"
#include "tests/server/unfinished_calls.h"

namespace crumb::server {
namespace {

constexpr uint64_t kMiB = uint64_t{1} << 20;
constexpr uint64_t kReceiveBytesMax = 32 * kMiB;
// Memory that gRPC's quota does not count: calls, connections, and freed memory that the allocator
// keeps. It is a fraction of kSentBytesMin, so that a quota without effect fails the test.
constexpr uint64_t kUncountedBytesMax = 128 * kMiB;
constexpr uint64_t kSentBytesMin = 400 * kMiB;

// crumbd as a process of its own, so that its memory can be told from the callers'.
class UnfinishedMessagesTest : public testing::Test {
 protected:
  UnfinishedMessagesTest() {
    std::ofstream(folder_.path() + "/tenants.json")
        << "{\"tenants\": [{\"name\": \"a\", \"token_sha256\": \"" << HexEncode(Sha256("token"))
        << "\"}]}";
    const std::string config = folder_.path() + "/crumbd.yaml";
    std::ofstream(config) << "listen:\n  socket_dir: " << folder_.path()
                          << "\nadmin:\n  listen: \"\"\nstore:\n  host:\n    bytes_max: 32MiB\n"
                          << "    slab_bytes: 16MiB\n  ssd:\n    path: \"\"\ntenants:\n  file: "
                          << folder_.path()
                          << "/tenants.json\nlimits:\n  receive_bytes_max: 32MiB\n"
                          << "log:\n  severity: \"off\"\n";
    pid_ = ::fork();
    if (pid_ == 0) {
      // One arena: with one for each of many CPUs, the resident memory tells what the allocator
      // keeps of freed memory rather than what crumbd holds.
      ::setenv("MALLOC_ARENA_MAX", "1", 1);
      ::execl(CRUMBD_PATH, CRUMBD_PATH, "--config", config.c_str(), nullptr);
      ::_exit(98);
    }
    EXPECT_TRUE(Eventually([&] { return std::ifstream(endpoints_).peek() == '{'; }));
  }
  ~UnfinishedMessagesTest() override {
    ::kill(pid_, SIGKILL);
    ::waitpid(pid_, nullptr, 0);
  }

  // Bytes of crumbd in memory that are neither of files nor shared.
  uint64_t ResidentBytes() const {
    std::ifstream status("/proc/" + std::to_string(pid_) + "/status");
    for (std::string line; std::getline(status, line);) {
      if (line.starts_with("RssAnon:")) return std::stoull(line.substr(8)) * 1024;
    }
    return 0;
  }
  grpc::Status Stats() const {
    const auto stub = v1::CacheService::NewStub(
        grpc::CreateChannel("unix:" + socket_, grpc::InsecureChannelCredentials()));
    grpc::ClientContext context;
    context.AddMetadata("authorization", "Bearer token");
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(10));
    v1::StatsResponse response;
    return stub->Stats(&context, {}, &response);
  }

  TemporaryFolder folder_;
  const std::string endpoints_ = folder_.path() + "/crumbd.endpoints.json";
  const std::string socket_ = folder_.path() + "/crumbd.sock";
  pid_t pid_ = 0;
};

TEST_F(UnfinishedMessagesTest, MemoryBeforeAuthenticationIsBoundedAndComesBack) {
  ASSERT_TRUE(Stats().ok());
  const uint64_t before = ResidentBytes();
  ASSERT_GT(before, 0u);
  std::vector<std::unique_ptr<UnfinishedCalls>> callers;
  uint64_t most = 0;
  uint64_t sent = 0;
  for (int i = 0; i < 4; ++i) {
    callers.push_back(std::make_unique<UnfinishedCalls>(socket_, /*calls=*/100,
                                                        static_cast<uint32_t>(4 * kMiB - 1)));
    ASSERT_TRUE(callers.back()->connected());
    callers.back()->Push(/*quiet_ms=*/500);
    sent += callers.back()->sent_bytes();
    most = std::max(most, ResidentBytes());
  }
  EXPECT_GE(sent, kSentBytesMin);
  EXPECT_LE(most, before + kReceiveBytesMax + kUncountedBytesMax)
      << sent / kMiB << " MiB were sent, crumbd grew by " << (most - before) / kMiB << " MiB";
  const grpc::Status served = Stats();
  EXPECT_TRUE(served.ok()) << served.error_message();
  callers.clear();
  EXPECT_TRUE(Eventually([&] { return ResidentBytes() <= before + kUncountedBytesMax; },
                         std::chrono::seconds(30)))
      << "still " << (ResidentBytes() - before) / kMiB << " MiB more than before, at most "
      << (most - before) / kMiB;
  std::printf(
      "sent %d MiB, most %d MiB more, then %d MiB more\n", static_cast<int>(sent / kMiB),
      static_cast<int>((most - before) / kMiB),
      static_cast<int>((static_cast<int64_t>(ResidentBytes()) - static_cast<int64_t>(before)) /
                       static_cast<int64_t>(kMiB)));
}

}  // namespace
}  // namespace crumb::server
