// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
// Tests that need the real transport: peers that die, leaks, idleness, hostile messages.
#include "transport/ucx_transport.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <time.h>

#include <filesystem>
#include <fstream>
#include <random>
#include <thread>

#include "tests/common/eventually.h"
#include "tests/transport/fetch_calls.h"
#include "tests/transport/peer_process.h"
#include "tests/transport/raw_peer.h"
#include "tests/transport/sample_source.h"

namespace crumb::transport {
namespace {

using ::testing::AnyOf;
using ::testing::Each;
using ::testing::ElementsAre;

constexpr uint32_t kTileBytes = 4608;
constexpr TileRange kWhole = {{0, 6}, {0, 4}};
constexpr TileRange kPeerRange = {{0, 32}, {0, 8}};

TransportOptions LoopbackOptions() {
  TransportOptions options;
  options.listen = "127.0.0.1:0";
  options.reconnect_after_min = options.reconnect_after_max = std::chrono::milliseconds(1);
  return options;
}

// Requests all pages of the serving peer: 32 MiB in one fetch, more than sockets buffer.
void WantAllOfThePeer(Destination& to) {
  for (int page = 0; page < 8; ++page) to.Want(page, kPeerRange, 16 << 10);
}

size_t Descriptors() {
  const std::filesystem::directory_iterator entries("/proc/self/fd");
  return static_cast<size_t>(std::distance(begin(entries), end(entries)));
}

size_t Mappings() {
  std::ifstream maps("/proc/self/maps");
  size_t lines = 0;
  for (std::string line; std::getline(maps, line);) ++lines;
  return lines;
}

double ProcessCpuSeconds() {
  timespec time{};
  ::clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_nsec) * 1e-9;
}

class PeerDeath : public ::testing::TestWithParam<bool> {};

TEST_P(PeerDeath, KilledWhileSending) {
  const auto client = *OpenUcxTransport(LoopbackOptions(), nullptr);
  std::mt19937 random(3);
  for (int round = 0; round < 5; ++round) {
    const auto peer = PeerProcess::Start(GetParam());
    ASSERT_TRUE(peer);
    Destination to;
    WantAllOfThePeer(to);
    ASSERT_THAT(StatusesOf(PendingFetch(*client, peer->address(), to.Request()).Wait()),
                Each(PageStatus::kHit));
    PendingFetch fetch(*client, peer->address(), to.Request());
    const TimePoint until = Clock::Real().Now() + std::chrono::microseconds(random() % 8000);
    while (Clock::Real().Now() < until) std::this_thread::yield();
    peer->Kill();
    const FetchResponse response = fetch.Wait();
    ASSERT_EQ(response.pages.size(), 8u);
    EXPECT_THAT(StatusesOf(response), Each(AnyOf(PageStatus::kHit, PageStatus::kUnavailable)));
    EXPECT_EQ(to.FirstWrong(response.pages), -1);
    EXPECT_TRUE(Eventually([&] { return to.released(); })) << "round " << round;
  }
  EXPECT_TRUE(Eventually([&] { return client->stats().connections == 0; }));
}

// A peer hangs during a transfer: the fetch ends at its deadline, and its memory stays in
// quarantine until the connection was closed by force.
TEST_P(PeerDeath, HangingWhileSending) {
  TransportOptions options = LoopbackOptions();
  options.quarantine_for = std::chrono::milliseconds(100);
  const auto client = *OpenUcxTransport(options, nullptr);
  uint64_t quarantined = 0;
  for (int round = 0; round < 8; ++round) {
    const auto peer = PeerProcess::Start(GetParam());
    ASSERT_TRUE(peer);
    Destination to;
    WantAllOfThePeer(to);
    ASSERT_THAT(StatusesOf(PendingFetch(*client, peer->address(), to.Request()).Wait()),
                Each(PageStatus::kHit));
    FetchRequest request = to.Request();
    request.deadline = Clock::Real().Now() + std::chrono::milliseconds(300);
    PendingFetch fetch(*client, peer->address(), request);
    request.memory.reset();
    const TimePoint until = Clock::Real().Now() + std::chrono::microseconds(500 + 700 * round);
    while (Clock::Real().Now() < until) std::this_thread::yield();
    peer->Signal(SIGSTOP);
    const FetchResponse response = fetch.Wait();
    EXPECT_THAT(StatusesOf(response), Each(AnyOf(PageStatus::kHit, PageStatus::kDeadline)));
    EXPECT_EQ(to.FirstWrong(response.pages), -1);
    EXPECT_TRUE(Eventually([&] { return to.released(); })) << "round " << round;
    client->Disconnect(peer->address());
  }
  quarantined = client->stats().quarantined;
  EXPECT_EQ(client->stats().quarantine_bytes, 0u);
  if (GetParam()) {
    // Over TCP without rendezvous no transfer writes after the end of its fetch.
    EXPECT_GT(quarantined, 0u);
    EXPECT_GT(client->stats().forced_closes, 0u);
  } else {
    EXPECT_EQ(quarantined, 0u);
  }
}

INSTANTIATE_TEST_SUITE_P(Frames, PeerDeath, ::testing::Bool(),
                         [](const auto& kind) { return kind.param ? "Rendezvous" : "Eager"; });

// A peer that sends requests and does not read the replies must not keep leases.
TEST(UcxTransportTest, RequesterThatHangsLosesItsLease) {
  SampleSource source;
  source.Add(1, {{{0, 64}, {0, 64}}}, 16 << 10);  // 64 MiB
  TransportOptions options = LoopbackOptions();
  options.quarantine_for = std::chrono::milliseconds(100);
  const auto server = *OpenUcxTransport(options, &source);
  RawPeer peer(server->address());
  ASSERT_TRUE(peer.Hello());
  FetchBody fetch;
  fetch.session = kSampleSession;
  fetch.keyspace = SampleKeyspace();
  fetch.generation = kSampleGeneration;
  fetch.time_left_us = 100000;
  fetch.pages = {{SampleKey(1), {{0, 64}, {0, 64}}, 16 << 10}};
  peer.SendFetch(5, fetch);
  ASSERT_TRUE(Eventually([&] {
    peer.Progress();
    return source.requests() == 1;
  }));
  // From here on the peer never reads its socket again.
  EXPECT_TRUE(Eventually([&] { return source.leases() == 0; }));
  EXPECT_TRUE(Eventually([&] { return server->stats().serve_bytes_in_flight == 0; }));
}

// These messages are sent with UCX itself, because this transport never sends them.
TEST(UcxTransportTest, HostileMessages) {
  SampleSource source;
  source.Add(1, {kWhole}, kTileBytes);
  const auto server = *OpenUcxTransport(LoopbackOptions(), &source);
  const auto client = *OpenUcxTransport(LoopbackOptions(), nullptr);
  Destination to;
  to.Want(1, kWhole, kTileBytes);
  std::mt19937 random(11);
  for (int round = 0; round < 60; ++round) {
    RawPeer peer(server->address());
    const bool greeted = round % 4 == 0 || peer.Hello();
    EXPECT_TRUE(greeted);
    for (int i = 0; i < 20; ++i) {
      FrameHeader header;
      header.type = static_cast<FrameType>(1 + random() % 5);
      header.connection = random() % 4 == 0 ? random() : peer.theirs();
      header.fetch = random() % 3;
      header.page = random() % 3;
      header.count = random() % 3;
      std::vector<std::byte> body(random() % 200);
      for (std::byte& byte : body) byte = static_cast<std::byte>(random());
      peer.Send(header, body, /*seal=*/random() % 4 != 0, /*reply=*/random() % 4 == 0);
    }
    peer.SendRaw(std::vector<std::byte>(random() % 100), std::vector<std::byte>(random() % 300000));
    peer.Flush();
  }
  EXPECT_THAT(StatusesOf(PendingFetch(*client, server->address(), to.Request()).Wait()),
              ElementsAre(PageStatus::kHit));
  EXPECT_GT(server->stats().frames_refused, 20u);
  EXPECT_TRUE(Eventually([&] { return source.leases() == 0; }));
}

TEST(UcxTransportTest, PeerOfAnotherVersionReceivesOurs) {
  SampleSource source;
  const auto server = *OpenUcxTransport(LoopbackOptions(), &source);
  RawPeer peer(server->address());
  Hello newer;
  newer.version_min = newer.version_max = 9;
  ASSERT_TRUE(peer.Hello(newer));
  EXPECT_EQ(peer.hello().version_min, kVersionMin);
  EXPECT_EQ(peer.hello().version_max, kVersionMax);
  EXPECT_TRUE(Eventually([&] { return server->stats().version_mismatches == 1; }));
}

TEST(UcxTransportTest, NothingStaysBehind) {
  SampleSource source;
  source.Add(1, {kWhole}, kTileBytes);
  const auto server = *OpenUcxTransport(LoopbackOptions(), &source);
  const auto client = *OpenUcxTransport(LoopbackOptions(), nullptr);
  Destination to;
  to.Want(1, kWhole, kTileBytes);
  const auto sessions = [&](int endpoints) {
    for (int i = 0; i < endpoints; ++i) {
      ASSERT_THAT(StatusesOf(PendingFetch(*client, server->address(), to.Request()).Wait()),
                  ElementsAre(PageStatus::kHit));
      client->Disconnect(server->address());
    }
    ASSERT_TRUE(Eventually(
        [&] { return server->stats().connections == 0 && client->stats().connections == 0; }));
  };
  sessions(50);  // pools have grown
  const size_t descriptors = Descriptors(), mappings = Mappings();
  sessions(1000);
  EXPECT_TRUE(Eventually([&] { return Descriptors() <= descriptors; })) << Descriptors();
  EXPECT_LE(Mappings(), mappings + 8);
  EXPECT_TRUE(Eventually([&] { return source.leases() == 0; }));
}

TEST(UcxTransportTest, StoppedTransportsLeaveNothing) {
  const auto open_and_drop = [] {
    SampleSource source;
    source.Add(1, {kWhole}, kTileBytes);
    const auto server = *OpenUcxTransport(LoopbackOptions(), &source);
    const auto client = *OpenUcxTransport(LoopbackOptions(), nullptr);
    Destination to;
    to.Want(1, kWhole, kTileBytes);
    ASSERT_THAT(StatusesOf(PendingFetch(*client, server->address(), to.Request()).Wait()),
                ElementsAre(PageStatus::kHit));
  };
  for (int i = 0; i < 5; ++i) open_and_drop();
  const size_t descriptors = Descriptors(), mappings = Mappings();
  for (int i = 0; i < 40; ++i) open_and_drop();
  EXPECT_LE(Descriptors(), descriptors);
  EXPECT_LE(Mappings(), mappings + 8);
}

TEST(UcxTransportTest, IdleThreadsSleep) {
  SampleSource source;
  source.Add(1, {kWhole}, kTileBytes);
  const auto server = *OpenUcxTransport(LoopbackOptions(), &source);
  const auto client = *OpenUcxTransport(LoopbackOptions(), nullptr);
  Destination to;
  to.Want(1, kWhole, kTileBytes);
  ASSERT_THAT(StatusesOf(PendingFetch(*client, server->address(), to.Request()).Wait()),
              ElementsAre(PageStatus::kHit));
  // A fetch waits for a slow source, so that no thread has work.
  source.Hold();
  PendingFetch waiting(*client, server->address(), to.Request());
  ASSERT_TRUE(Eventually([&] { return source.requests() == 2; }));
  const double before = ProcessCpuSeconds();
  std::this_thread::sleep_for(std::chrono::milliseconds(500));  // the measured time
  EXPECT_LT(ProcessCpuSeconds() - before, 0.005);
  source.ReplyAll();
  EXPECT_THAT(StatusesOf(waiting.Wait()), ElementsAre(PageStatus::kHit));
}

TEST(UcxTransportTest, BindsToOneInterface) {
  for (const char* listen :
       {"192.0.2.1:0", "0.0.0.0:0", "localhost:0", "127.0.0.1", "127.0.0.1:x", "127.0.0.1:70000"}) {
    TransportOptions options;
    options.listen = listen;
    EXPECT_EQ(OpenUcxTransport(options, nullptr).status().code(),
              absl::StatusCode::kInvalidArgument)
        << listen;
  }
  const auto first = *OpenUcxTransport(LoopbackOptions(), nullptr);
  TransportOptions taken;
  taken.listen = first->address();
  EXPECT_EQ(OpenUcxTransport(taken, nullptr).status().code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(first->Describe(), ::testing::MatchesRegex("ucx [0-9.]+, tcp on lo"));
}

TEST(UcxTransportTest, SelfTestMeasuresASpeed) {
  const auto test = RunSelfTest(LoopbackOptions());
  ASSERT_TRUE(test.ok()) << test.status();
  EXPECT_GT(test->gb_per_s, 0.01);
  EXPECT_THAT(test->description, ::testing::StartsWith("ucx "));
}

}  // namespace
}  // namespace crumb::transport
