// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
// Runs UCX over TCP through a proxy that drops, delays, cuts and corrupts the bytes below UCX.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/common/eventually.h"
#include "tests/transport/fetch_calls.h"
#include "tests/transport/sample_source.h"
#include "tests/transport/tcp_proxy.h"
#include "transport/ucx_transport.h"

namespace crumb::transport {
namespace {

using ::testing::AnyOf;
using ::testing::Contains;
using ::testing::Each;
using Mode = TcpProxy::Mode;

constexpr uint32_t kTileBytes = 4608;
constexpr TileRange kWhole = {{0, 32}, {0, 8}};  // 1.1 MiB

// These bytes are in tiles and in no header.
std::vector<std::byte> Marker() {
  std::vector<std::byte> marker;
  for (size_t i = 0; i < 600; ++i) marker.push_back(SampleByte(1, 20, 3, 1000 + i));
  return marker;
}

class ProxyTest : public ::testing::TestWithParam<bool> {
 protected:
  ProxyTest() {
    TransportOptions options;
    options.listen = "127.0.0.1:0";
    options.reconnect_after_min = options.reconnect_after_max = std::chrono::milliseconds(1);
    options.connect_timeout = std::chrono::milliseconds(500);
    options.quarantine_for = std::chrono::milliseconds(50);
    if (GetParam()) options.frame_bytes.value = 1 << 20;
    source_.Add(1, {kWhole}, kTileBytes);
    source_.Add(2, {kWhole}, kTileBytes);
    server_ = *OpenUcxTransport(options, &source_);
    client_ = *OpenUcxTransport(options, nullptr);
    to_.Want(1, kWhole, kTileBytes);
    to_.Want(2, kWhole, kTileBytes);
  }
  std::vector<PageStatus> Fetch(Duration patience = std::chrono::seconds(20)) {
    FetchRequest request = to_.Request();
    request.deadline = Clock::Real().Now() + patience;
    const FetchResponse response = PendingFetch(*client_, server_->address(), request).Wait();
    EXPECT_EQ(to_.FirstWrong(response.pages), -1);
    return StatusesOf(response);
  }
  bool Hits() { return Fetch() == std::vector{PageStatus::kHit, PageStatus::kHit}; }
  // After the stream is whole again, fetches succeed, possibly over another connection.
  void ExpectHealthy() {
    proxy_.SetMode(Mode::kForward);
    EXPECT_TRUE(Eventually([&] {
      client_->Disconnect(server_->address());
      return Hits();
    }));
    EXPECT_TRUE(Eventually([&] { return to_.released(); }));
    EXPECT_TRUE(Eventually([&] { return source_.leases() == 0; }));
  }

  TcpProxy proxy_{Marker()};  // outlives the transports
  SampleSource source_;
  Destination to_;
  std::unique_ptr<Transport> server_;
  std::unique_ptr<Transport> client_;
};

TEST_P(ProxyTest, Forwards) {
  EXPECT_TRUE(Hits());
  EXPECT_GE(proxy_.connections(), 2);  // UCX's connection manager and its data
}

TEST_P(ProxyTest, CorruptsATile) {
  ASSERT_TRUE(Hits());
  proxy_.SetMode(Mode::kCorrupt);
  // The marker may lie across two pieces of the stream; then the fetch is a hit.
  EXPECT_TRUE(Eventually([&] {
    const int before = proxy_.corrupted();
    const std::vector<PageStatus> statuses = Fetch();
    if (proxy_.corrupted() == before) {
      EXPECT_THAT(statuses, Each(PageStatus::kHit));
      return false;
    }
    // Tiles of both pages hold these bytes.
    EXPECT_THAT(statuses, Each(AnyOf(PageStatus::kHit, PageStatus::kCorrupt)));
    EXPECT_THAT(statuses, Contains(PageStatus::kCorrupt));
    return true;
  }));
  proxy_.SetMode(Mode::kForward);
  EXPECT_TRUE(Hits());
  EXPECT_EQ(client_->stats().connections_opened, 1u);
}

TEST_P(ProxyTest, Delays) {
  ASSERT_TRUE(Hits());
  proxy_.SetMode(Mode::kDelay);
  EXPECT_TRUE(Hits());
  EXPECT_THAT(Fetch(std::chrono::milliseconds(3)),
              Each(AnyOf(PageStatus::kHit, PageStatus::kDeadline)));
  EXPECT_TRUE(Hits());
  ExpectHealthy();
}

TEST_P(ProxyTest, Drops) {
  ASSERT_TRUE(Hits());
  proxy_.SetMode(Mode::kDrop);
  EXPECT_THAT(Fetch(std::chrono::milliseconds(50)), Each(PageStatus::kDeadline));
  ExpectHealthy();
  // A new connection gets no reply at all.
  client_->Disconnect(server_->address());
  proxy_.SetMode(Mode::kDrop);
  EXPECT_THAT(Fetch(), Each(PageStatus::kUnavailable));
  ExpectHealthy();
}

TEST_P(ProxyTest, Cuts) {
  for (int round = 0; round < 3; ++round) {
    ASSERT_TRUE(Eventually([&] { return Hits(); }));
    proxy_.SetMode(Mode::kCut);
    EXPECT_THAT(Fetch(), Each(AnyOf(PageStatus::kHit, PageStatus::kUnavailable)));
    ExpectHealthy();
  }
  EXPECT_GE(client_->stats().connections_failed, 1u);
}

INSTANTIATE_TEST_SUITE_P(Frames, ProxyTest, ::testing::Bool(),
                         [](const auto& kind) { return kind.param ? "Rendezvous" : "Eager"; });

}  // namespace
}  // namespace crumb::transport
