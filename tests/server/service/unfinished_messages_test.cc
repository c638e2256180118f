// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
// Callers without a token send messages that never end: crumbd's memory stays within a bound, comes
// back when the callers go, and others are served meanwhile.
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "common/hex.h"
#include "common/sha256.h"
#include "crumb/v1/cache_service.grpc.pb.h"
#include "grpcpp/grpcpp.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "tests/common/eventually.h"
#include "tests/common/temporary_folder.h"
#include "tests/server/generic_call.h"
#include "tests/server/series.h"
#include "tests/server/test_client.h"
#include "tests/server/unfinished_calls.h"

namespace crumb::server {
namespace {

constexpr double kMiB = 1 << 20;
constexpr double kReceiveBytesMax = 32 * kMiB;
// Memory that gRPC's quota does not count, such as calls and connections. It is a fraction of
// kSentBytesMin, so that a quota without effect fails the test.
constexpr double kUncountedBytesMax = 48 * kMiB;
constexpr double kSentBytesMin = 256 * kMiB;
// Returns the bytes of heap that the allocator keeps after it has returned free pages.
constexpr double kKeptBytesMax = 48 * kMiB;

// crumbd as a process of its own, so that its memory can be distinguished from the callers'.
class UnfinishedMessagesTest : public testing::Test {
 protected:
  UnfinishedMessagesTest() {
    std::ofstream(folder_.path() + "/tenants.json")
        << "{\"tenants\": [{\"name\": \"a\", \"token_sha256\": \"" << HexEncode(Sha256("token"))
        << "\"}]}";
    const std::string config = folder_.path() + "/crumbd.yaml";
    std::ofstream(config)
        << "listen:\n  socket_dir: " << folder_.path()
        << "\nadmin:\n  listen: 127.0.0.1:0\nstore:\n  host:\n    bytes_max: 32MiB\n"
        << "    slab_bytes: 16MiB\n  ssd:\n    path: \"\"\ntenants:\n  file: " << folder_.path()
        << "/tenants.json\n  shared_memory: all\nlimits:\n  receive_bytes_max: 32MiB\n"
        << "log:\n  severity: \"off\"\n";
    pid_ = ::fork();
    if (pid_ == 0) {
      ::execl(CRUMBD_PATH, CRUMBD_PATH, "--config", config.c_str(), nullptr);
      ::_exit(98);
    }
    EXPECT_TRUE(Eventually([&] { return std::ifstream(endpoints_).peek() == '{'; }));
    admin_ = nlohmann::json::parse(std::ifstream(endpoints_))["admin"].get<std::string>();
  }
  ~UnfinishedMessagesTest() override {
    ::kill(pid_, SIGKILL);
    ::waitpid(pid_, nullptr, 0);
  }

  // Bytes of crumbd in memory that are neither of files nor shared.
  double ResidentBytes() const {
    std::ifstream status("/proc/" + std::to_string(pid_) + "/status");
    for (std::string line; std::getline(status, line);) {
      if (line.starts_with("RssAnon:")) return std::stod(line.substr(8)) * 1024;
    }
    return 0;
  }
  int Threads() const {
    std::ifstream status("/proc/" + std::to_string(pid_) + "/status");
    for (std::string line; std::getline(status, line);) {
      if (line.starts_with("Threads:")) return std::stoi(line.substr(8));
    }
    return 0;
  }
  // Resident memory varies with the freed memory that the allocator keeps; this figure does not.
  double HeapBytes() const { return SeriesOf(admin_, "crumb_heap_bytes{state=\"used\"}"); }
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
  std::string admin_;
  pid_t pid_ = 0;
};

TEST_F(UnfinishedMessagesTest, MemoryBeforeAuthenticationIsBoundedAndComesBack) {
  ASSERT_TRUE(Stats().ok());
  const double resident_before = ResidentBytes();
  const double heap_before = HeapBytes();
  ASSERT_GT(resident_before, 0);
  ASSERT_GT(heap_before, 0);
  std::vector<std::unique_ptr<UnfinishedCalls>> callers;
  double heap_most = 0;
  double sent = 0;
  for (int i = 0; i < 4; ++i) {
    callers.push_back(std::make_unique<UnfinishedCalls>(socket_, /*calls=*/100,
                                                        static_cast<uint32_t>(4 * kMiB - 1)));
    ASSERT_TRUE(callers.back()->connected());
    callers.back()->Push(/*quiet_ms=*/500);
    sent += static_cast<double>(callers.back()->sent_bytes());
    heap_most = std::max(heap_most, HeapBytes());
  }
  EXPECT_GE(sent, kSentBytesMin);
  EXPECT_LE(heap_most, heap_before + kReceiveBytesMax + kUncountedBytesMax);
  const grpc::Status served = Stats();
  EXPECT_TRUE(served.ok()) << served.error_message();
  const double resident_most = ResidentBytes();
  callers.clear();
  EXPECT_TRUE(Eventually([&] { return ResidentBytes() <= resident_before + kKeptBytesMax; },
                         std::chrono::seconds(60)));
  std::printf("sent %.0f MiB: the heap grew by %.1f MiB, resident memory by %.1f and then %.1f\n",
              sent / kMiB, (heap_most - heap_before) / kMiB,
              (resident_most - resident_before) / kMiB, (ResidentBytes() - resident_before) / kMiB);
}

// 128 MiB of zeros are 128 KiB on the wire. A server that unpacks them refuses them afterwards,
// with kResourceExhausted.
TEST_F(UnfinishedMessagesTest, CompressedMessagesAreRefusedBeforeTheyAreUnpacked) {
  const auto stub = v1::CacheService::NewStub(
      grpc::CreateChannel("unix:" + socket_, grpc::InsecureChannelCredentials()));
  v1::LookupRequest request;
  request.set_keys(std::string(128 << 20, '\0'));
  for (const bool known : {false, true}) {
    grpc::ClientContext context;
    context.set_compression_algorithm(GRPC_COMPRESS_GZIP);
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(60));
    if (known) context.AddMetadata("authorization", "Bearer token");
    v1::LookupResponse response;
    EXPECT_EQ(stub->Lookup(&context, request, &response).error_code(),
              known ? grpc::StatusCode::INVALID_ARGUMENT : grpc::StatusCode::UNAUTHENTICATED);
  }
  EXPECT_TRUE(Stats().ok());
}

// A group of field 15, which no message has, without content: two bytes that take 48 as a message.
constexpr char kGroup[] = "\x7b\x7c";
constexpr uint32_t kGroupsBytes = (4 << 20) - 2;

struct Hostile {
  const char* name;
  const char* token;
  char last;  // the last byte of each message: the end of a group, or nonsense
};

class DecodedMessagesTest : public UnfinishedMessagesTest,
                            public testing::WithParamInterface<Hostile> {};

// The statuses of these calls cannot be sent, because their caller reads nothing. Their requests
// would take 500 MiB if they stayed as messages.
TEST_P(DecodedMessagesTest, RequestsOfCallersThatReadNoStatusAreFreed) {
  constexpr int kCalls = 5;
  // So many statuses fill a socket of Linux; behind 460 of them gRPC reads nothing more.
  constexpr int kStatuses = 350;
  ASSERT_TRUE(Stats().ok());
  const double before = HeapBytes();
  UnfinishedCalls calls(socket_, kCalls, kGroupsBytes, kGroup, GetParam().token);
  ASSERT_TRUE(calls.connected());
  calls.Push(/*quiet_ms=*/500);
  EXPECT_EQ(calls.sent_bytes(), uint64_t{kCalls} * (kGroupsBytes - 1)) << "all but the last bytes";
  calls.FillSocket(kStatuses);
  std::this_thread::sleep_for(std::chrono::milliseconds(500));
  calls.SendLastBytes(GetParam().last);
  std::this_thread::sleep_for(std::chrono::seconds(3));
  EXPECT_LE(HeapBytes(), before + kUncountedBytesMax);
  EXPECT_FALSE(calls.closed());
  EXPECT_TRUE(Stats().ok());
}

INSTANTIATE_TEST_SUITE_P(Callers, DecodedMessagesTest,
                         testing::Values(Hostile{"Strangers", "", '\x7c'},
                                         Hostile{"NonsenseOfStrangers", "", '\xff'},
                                         Hostile{"Tenants", "token", '\x7c'},
                                         Hostile{"NonsenseOfTenants", "token", '\xff'}),
                         [](const auto& hostile) { return hostile.param.name; });

// One stream, which stays open, keeps no message in memory.
TEST_F(UnfinishedMessagesTest, MessagesOfOpenStreamsAreFreed) {
  TestClient client(folder_.path() + "/crumbd.fd.sock", "unix:" + socket_, 1 << 20, "token");
  ASSERT_TRUE(client.OpenKeyspace().ok());
  std::string groups;
  for (uint32_t i = 0; i < kGroupsBytes; ++i) groups += kGroup[i % 2];
  const double before = HeapBytes();
  const auto context = client.Context();
  const auto session = client.stub().Session(context.get());
  v1::SessionRequest message;
  ASSERT_TRUE(message.ParseFromString(groups));
  ASSERT_TRUE(session->Write(message));
  const auto put_context = client.Context();
  v1::PutResponse stored;
  const auto put = client.stub().Put(put_context.get(), &stored);
  v1::PutRequest piece;
  ASSERT_TRUE(piece.ParseFromString(groups));
  piece.set_keyspace(client.keyspace().keyspace());
  ASSERT_TRUE(put->Write(piece));
  std::this_thread::sleep_for(std::chrono::seconds(3));
  EXPECT_LE(HeapBytes(), before + kUncountedBytesMax);
  EXPECT_TRUE(Stats().ok());
  context->TryCancel();
  put_context->TryCancel();
  session->Finish().error_code();
  put->Finish().error_code();
}

// Calls of gRPC's reflection service hold a thread each.
TEST_F(UnfinishedMessagesTest, ThreadsOfReflectionAreBounded) {
  ASSERT_TRUE(Stats().ok());
  const int before = Threads();
  const UnreadCalls calls(socket_, "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
                          /*calls=*/100, /*request=*/
                          "\x1a\x01"
                          "a");
  ASSERT_TRUE(calls.connected());
  std::this_thread::sleep_for(std::chrono::seconds(1));
  EXPECT_LE(Threads(), before + 16);
  EXPECT_TRUE(Stats().ok());
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(10));
  const auto channel = grpc::CreateChannel("unix:" + socket_, grpc::InsecureChannelCredentials());
  EXPECT_TRUE(Call(channel, context, "/grpc.health.v1.Health/Check", {""}).ok());
}

}  // namespace
}  // namespace crumb::server
