// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
// Tests the contract of Transport with every implementation.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <future>
#include <random>
#include <thread>

#include "tests/common/eventually.h"
#include "tests/transport/fetch_calls.h"
#include "tests/transport/sample_source.h"
#include "transport/loopback_transport.h"
#include "transport/ucx_transport.h"

namespace crumb::transport {
namespace {

using ::testing::Each;
using ::testing::ElementsAre;

constexpr uint32_t kTileBytes = 4608;
constexpr TileRange kWhole = {{0, 6}, {0, 4}};

enum class Kind { kLoopback, kUcxEager, kUcxRendezvous };

class TransportContract : public ::testing::TestWithParam<Kind> {
 protected:
  TransportOptions Options() const {
    TransportOptions options;
    options.listen = "127.0.0.1:0";
    options.reconnect_after_min = std::chrono::milliseconds(1);
    options.reconnect_after_max = std::chrono::milliseconds(5);
    if (GetParam() == Kind::kUcxRendezvous) {
      options.segment_bytes.value = 16 << 10;
      options.frame_bytes.value = 64 << 10;
    }
    return options;
  }
  std::unique_ptr<Transport> Open(const TransportOptions& options, FragmentSource* source) {
    auto opened = GetParam() == Kind::kLoopback ? network_.Open(options, source)
                                                : OpenUcxTransport(options, source);
    EXPECT_TRUE(opened.ok()) << opened.status();
    return opened.ok() ? *std::move(opened) : nullptr;
  }
  void Start(const TransportOptions& serving, const TransportOptions& fetching) {
    server_ = Open(serving, &source_);
    client_ = Open(fetching, nullptr);
    ASSERT_TRUE(server_ && client_);
  }
  void Start() { Start(Options(), Options()); }
  PendingFetch Fetch(FetchRequest request) {
    return PendingFetch(*client_, server_->address(), std::move(request));
  }

  LoopbackNetwork network_;
  SampleSource source_;
  std::unique_ptr<Transport> server_;
  std::unique_ptr<Transport> client_;
};

TEST_P(TransportContract, DeliversWholeFragment) {
  source_.Add(1, {kWhole}, kTileBytes);
  Start();
  Destination to;
  to.Want(1, kWhole, kTileBytes);
  const FetchResponse response = Fetch(to.Request()).Wait();
  ASSERT_THAT(StatusesOf(response), ElementsAre(PageStatus::kHit)) << response.detail;
  EXPECT_EQ(to.FirstWrong(response.pages), -1);
  ASSERT_EQ(response.pages[0].fragments.size(), 1u);
  EXPECT_EQ(response.pages[0].fragments[0].delivered, kWhole);
  EXPECT_EQ(response.pages[0].fragments[0].header.key, SampleKey(1));
  EXPECT_EQ(response.pages[0].fragments[0].header.tile_sums.size(), 24u);
  EXPECT_EQ(client_->stats().bytes_fetched, 24u * kTileBytes);
  EXPECT_TRUE(Eventually([&] { return source_.leases() == 0 && to.released(); }));
  EXPECT_TRUE(Eventually([&] { return server_->stats().serve_bytes_in_flight == 0; }));
}

// Four ranks wrote the page; readers have other degrees of parallelism.
TEST_P(TransportContract, GathersRangesFromFragmentsAndScattersThem) {
  const std::vector<TileRange> quarters = {
      {{0, 3}, {0, 2}}, {{0, 3}, {2, 4}}, {{3, 6}, {0, 2}}, {{3, 6}, {2, 4}}};
  source_.Add(1, quarters, kTileBytes);
  source_.Add(2, {kWhole}, 128);
  Start();
  Destination to;
  to.Want(1, kWhole, kTileBytes);
  to.Want(1, {{2, 5}, {1, 3}}, kTileBytes, 64);
  to.Want(2, {{1, 6}, {2, 3}}, 128, 3);
  to.Want(1, {{5, 6}, {3, 4}}, kTileBytes);
  to.Want(2, {{0, 6}, {1, 4}}, 128);
  const FetchResponse response = Fetch(to.Request()).Wait();
  ASSERT_THAT(StatusesOf(response), Each(PageStatus::kHit)) << response.detail;
  EXPECT_EQ(to.FirstWrong(response.pages), -1);
  EXPECT_EQ(response.pages[0].fragments.size(), 4u);
  EXPECT_EQ(response.pages[1].fragments.size(), 4u);
  EXPECT_EQ(response.pages[3].fragments.size(), 1u);
  EXPECT_EQ(response.pages[1].fragments[0].delivered, (TileRange{{2, 3}, {1, 2}}));
}

TEST_P(TransportContract, ReportsEachPagesStatus) {
  source_.Add(1, {kWhole}, kTileBytes);
  source_.Add(2, {{{0, 3}, {0, 4}}}, kTileBytes);
  source_.Add(3, {kWhole}, kTileBytes, SampleSource::Flaw::kTileFlipped);
  source_.Add(4, {kWhole}, kTileBytes, SampleSource::Flaw::kHeaderFlipped);
  source_.Add(5, {kWhole}, kTileBytes, SampleSource::Flaw::kOtherKey);
  source_.Add(6, {kWhole}, 2304);
  source_.Add(7, {kWhole}, kTileBytes, SampleSource::Flaw::kOtherKeyspace);
  Start();
  Destination to;
  for (int page = 0; page < 8; ++page) to.Want(page, kWhole, kTileBytes);
  to.Want(1, {{0, 1}, {0, 4}}, kTileBytes);
  to.Want(3, {{0, 1}, {0, 4}}, kTileBytes);  // the flipped tile is not among these
  const FetchResponse response = Fetch(to.Request()).Wait();
  EXPECT_THAT(
      StatusesOf(response),
      ElementsAre(PageStatus::kAbsent, PageStatus::kHit, PageStatus::kNotCovered,
                  PageStatus::kCorrupt, PageStatus::kCorrupt, PageStatus::kCorrupt,
                  PageStatus::kCorrupt, PageStatus::kCorrupt, PageStatus::kHit, PageStatus::kHit))
      << response.detail;
  EXPECT_EQ(response.detail.code(), absl::StatusCode::kDataLoss);
  EXPECT_EQ(to.FirstWrong(response.pages), -1);
  EXPECT_EQ(client_->stats().pages_fetched[static_cast<size_t>(PageStatus::kCorrupt)], 5u);
}

TEST_P(TransportContract, RefusesOtherSessionsAndMissesOtherGenerations) {
  source_.Add(1, {kWhole}, kTileBytes);
  Start();
  Destination to;
  to.Want(1, kWhole, kTileBytes);
  FetchRequest other_session = to.Request();
  other_session.session[3] ^= 1;
  EXPECT_THAT(StatusesOf(Fetch(other_session).Wait()), ElementsAre(PageStatus::kRefused));
  FetchRequest other_generation = to.Request();
  other_generation.generation += 1;
  EXPECT_THAT(StatusesOf(Fetch(other_generation).Wait()), ElementsAre(PageStatus::kStale));
  // A transport without a source refuses every request.
  EXPECT_THAT(StatusesOf(PendingFetch(*server_, client_->address(), to.Request()).Wait()),
              ElementsAre(PageStatus::kRefused));
}

TEST_P(TransportContract, DeadlineEndsTheWait) {
  source_.Add(1, {kWhole}, kTileBytes);
  source_.Hold();
  Start();
  Destination to;
  to.Want(1, kWhole, kTileBytes);
  FetchRequest request = to.Request();
  request.deadline = Clock::Real().Now() + std::chrono::milliseconds(50);
  PendingFetch late = Fetch(request);
  request.memory.reset();
  EXPECT_THAT(StatusesOf(late.Wait()), ElementsAre(PageStatus::kDeadline));
  EXPECT_GE(Clock::Real().Now(), request.deadline);
  EXPECT_TRUE(Eventually([&] { return to.released(); }));
  source_.ReplyAll();
  // The connection still works.
  const FetchResponse response = Fetch(to.Request()).Wait();
  EXPECT_THAT(StatusesOf(response), ElementsAre(PageStatus::kHit));
  EXPECT_EQ(to.FirstWrong(response.pages), -1);
  EXPECT_TRUE(Eventually([&] { return source_.leases() == 0; }));
  request.deadline = Clock::Real().Now();
  EXPECT_THAT(StatusesOf(Fetch(request).Wait()), ElementsAre(PageStatus::kDeadline));
}

TEST_P(TransportContract, CancelEndsTheWait) {
  source_.Add(1, {kWhole}, kTileBytes);
  source_.Hold();
  Start();
  Destination to;
  to.Want(1, kWhole, kTileBytes);
  PendingFetch fetch = Fetch(to.Request());
  ASSERT_TRUE(Eventually([&] { return source_.requests() == 1; }));
  EXPECT_FALSE(fetch.done());
  client_->Cancel(fetch.id());
  EXPECT_THAT(StatusesOf(fetch.Wait()), ElementsAre(PageStatus::kCancelled));
  EXPECT_TRUE(Eventually([&] { return server_->stats().serves_in_flight == 0; }));
  source_.ReplyAll();
  EXPECT_TRUE(Eventually([&] { return source_.leases() == 0 && to.released(); }));
  client_->Cancel(fetch.id());
  client_->Cancel(12345);
}

TEST_P(TransportContract, OverItsBoundsThePeerIsBusy) {
  source_.Add(1, {kWhole}, kTileBytes);
  source_.Hold();
  TransportOptions serving = Options();
  serving.serves_max = 2;
  serving.fetch_pages_max = 4;
  Start(serving, Options());
  Destination to;
  to.Want(1, kWhole, kTileBytes);
  PendingFetch first = Fetch(to.Request()), second = Fetch(to.Request());
  ASSERT_TRUE(Eventually([&] { return source_.requests() == 2; }));
  EXPECT_THAT(StatusesOf(Fetch(to.Request()).Wait()), ElementsAre(PageStatus::kBusy));
  source_.ReplyAll();
  EXPECT_THAT(StatusesOf(first.Wait()), ElementsAre(PageStatus::kHit));
  EXPECT_THAT(StatusesOf(second.Wait()), ElementsAre(PageStatus::kHit));
  Destination many;
  for (int i = 0; i < 5; ++i) many.Want(1, kWhole, kTileBytes);
  EXPECT_THAT(StatusesOf(Fetch(many.Request()).Wait()), Each(PageStatus::kBusy));
  EXPECT_EQ(server_->stats().serves_refused, 2u);
}

TEST_P(TransportContract, BoundsLeasedBytes) {
  source_.Add(1, {{{0, 64}, {0, 64}}}, 16384);  // more than sockets hold
  TransportOptions serving = Options();
  serving.serve_bytes_max.value = 1;
  Start(serving, Options());
  Destination to;
  to.Want(1, {{0, 64}, {0, 64}}, 16384);
  // A single fetch is served whatever its size.
  const FetchResponse response = Fetch(to.Request()).Wait();
  EXPECT_THAT(StatusesOf(response), ElementsAre(PageStatus::kHit)) << response.detail;
  EXPECT_EQ(to.FirstWrong(response.pages), -1);
  source_.Hold();
  PendingFetch first = Fetch(to.Request()), second = Fetch(to.Request());
  // A third fetch keeps the client from reading, so that the first stays in flight until its end.
  std::promise<void> ended, read_on;
  const auto third = client_->Fetch(server_->address(), to.Request(), [&](const FetchResponse&) {
    ended.set_value();
    read_on.get_future().wait();
  });
  ASSERT_TRUE(third.ok());
  ASSERT_TRUE(Eventually([&] { return source_.requests() == 4; }));
  client_->Cancel(*third);
  ended.get_future().wait();
  source_.ReplyAll();
  const bool refused = Eventually(
      [&] { return GetParam() == Kind::kLoopback || server_->stats().serves_refused > 0; });
  read_on.set_value();
  EXPECT_TRUE(refused);
  std::vector<PageStatus> both = {first.Wait().pages[0].status, second.Wait().pages[0].status};
  if (GetParam() != Kind::kLoopback) {
    EXPECT_THAT(both, ElementsAre(PageStatus::kHit, PageStatus::kBusy));
  }
}

TEST_P(TransportContract, RefusesFetchesOverItsOwnBound) {
  source_.Hold();
  TransportOptions fetching = Options();
  fetching.fetches_max = 3;
  Start(Options(), fetching);
  Destination to;
  to.Want(1, kWhole, kTileBytes);
  std::vector<PendingFetch> fetches;
  for (int i = 0; i < 3; ++i) fetches.push_back(Fetch(to.Request()));
  EXPECT_EQ(Fetch(to.Request()).status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(client_->stats().fetches_refused, 1u);
  ASSERT_TRUE(Eventually([&] { return source_.requests() == 3; }));
  source_.ReplyAll();
  for (PendingFetch& fetch : fetches) {
    EXPECT_THAT(StatusesOf(fetch.Wait()), ElementsAre(PageStatus::kAbsent));
  }
  EXPECT_TRUE(Eventually([&] { return client_->stats().fetches_in_flight == 0; }));
  EXPECT_TRUE(Fetch(to.Request()).status().ok());
}

TEST_P(TransportContract, RefusesMalformedRequests) {
  Start();
  Destination to;
  to.Want(1, kWhole, kTileBytes);
  const FetchRequest good = to.Request();
  std::vector<FetchRequest> bad(7, good);
  bad[0].pages.clear();
  bad[1].pages.resize(2000, good.pages[0]);
  bad[2].pages[0].range.layers = {3, 3};
  bad[3].pages[0].tile_bytes = 0;
  bad[4].pages[0].tile_bytes = kTileBytesMax + 1;
  bad[5].pages[0].places.first = nullptr;
  bad[6].pages[0].places.head_stride = kTileBytes - 1;
  for (const FetchRequest& request : bad) {
    EXPECT_EQ(Fetch(request).status().code(), absl::StatusCode::kInvalidArgument);
  }
  const FetchResponse nowhere = PendingFetch(*client_, "no address", good).Wait();
  EXPECT_THAT(StatusesOf(nowhere), ElementsAre(PageStatus::kUnavailable));
}

TEST_P(TransportContract, ComesBackAfterThePeerWasAway) {
  source_.Add(1, {kWhole}, kTileBytes);
  Start();
  const std::string address = server_->address();
  Destination to;
  to.Want(1, kWhole, kTileBytes);
  ASSERT_THAT(StatusesOf(Fetch(to.Request()).Wait()), ElementsAre(PageStatus::kHit));
  source_.Hold();
  PendingFetch underway = Fetch(to.Request());
  ASSERT_TRUE(Eventually([&] { return source_.requests() == 2; }));
  server_->Stop();
  const FetchResponse cut = underway.Wait();
  EXPECT_THAT(StatusesOf(cut), ElementsAre(PageStatus::kUnavailable));
  EXPECT_FALSE(cut.detail.ok());
  source_.ReplyAll();  // to a transport that is stopped
  EXPECT_TRUE(Eventually([&] { return source_.leases() == 0; }));
  EXPECT_THAT(StatusesOf(PendingFetch(*client_, address, to.Request()).Wait()),
              ElementsAre(PageStatus::kUnavailable));
  TransportOptions again = Options();
  again.listen = address;
  server_ = Open(again, &source_);
  ASSERT_TRUE(server_);
  EXPECT_TRUE(Eventually([&] {
    return StatusesOf(PendingFetch(*client_, address, to.Request()).Wait()) ==
           std::vector{PageStatus::kHit};
  }));
}

TEST_P(TransportContract, AConnectionMadeAheadIsTheOneThatFetchesUse) {
  source_.Add(1, {kWhole}, kTileBytes);
  Start();
  client_->Connect(server_->address());
  client_->Connect(server_->address());
  EXPECT_TRUE(Eventually([&] { return server_->stats().connections == 1; }));
  Destination to;
  to.Want(1, kWhole, kTileBytes);
  EXPECT_THAT(StatusesOf(Fetch(to.Request()).Wait()), ElementsAre(PageStatus::kHit));
  EXPECT_EQ(client_->stats().connections_opened, 1u);
  EXPECT_EQ(client_->stats().fetches, 1u);
  // No transport listens there; fetches from other peers are not affected.
  client_->Connect("127.0.0.1:1");
  client_->Connect("no address");
  Destination again;
  again.Want(1, kWhole, kTileBytes);
  EXPECT_THAT(StatusesOf(Fetch(again.Request()).Wait()), ElementsAre(PageStatus::kHit));
  client_->Stop();
  client_->Connect(server_->address());
}

// A thread that polls before it sleeps misses no event during or after the poll.
TEST_P(TransportContract, PollsAsLongAsItIsConfigured) {
  for (int page = 0; page < 8; ++page) source_.Add(page, {kWhole}, kTileBytes);
  for (const auto poll_for : {0, 50, 10'000}) {
    TransportOptions options = Options();
    options.poll_for = std::chrono::microseconds(poll_for);
    Start(options, options);
    for (int round = 0; round < 20; ++round) {
      Destination to;
      to.Want(round % 8, kWhole, kTileBytes);
      const FetchResponse response = Fetch(to.Request()).Wait();
      ASSERT_THAT(StatusesOf(response), ElementsAre(PageStatus::kHit)) << response.detail;
      EXPECT_EQ(to.FirstWrong(response.pages), -1);
    }
  }
}

TEST_P(TransportContract, DisconnectEndsFetchesAndLaterOnesConnectAgain) {
  source_.Add(1, {kWhole}, kTileBytes);
  source_.Hold();
  Start();
  Destination to;
  to.Want(1, kWhole, kTileBytes);
  PendingFetch fetch = Fetch(to.Request());
  ASSERT_TRUE(Eventually([&] { return source_.requests() == 1; }));
  client_->Disconnect(server_->address());
  EXPECT_THAT(StatusesOf(fetch.Wait()), ElementsAre(PageStatus::kUnavailable));
  source_.ReplyAll();
  EXPECT_THAT(StatusesOf(Fetch(to.Request()).Wait()), ElementsAre(PageStatus::kHit));
  EXPECT_EQ(client_->stats().connections_opened, 2u);
  EXPECT_TRUE(Eventually([&] { return server_->stats().connections == 1; }));
}

TEST_P(TransportContract, IdleConnectionsClose) {
  source_.Add(1, {kWhole}, kTileBytes);
  TransportOptions options = Options();
  options.idle_connection = std::chrono::milliseconds(100);
  Start(options, options);
  Destination to;
  to.Want(1, kWhole, kTileBytes);
  // On a loaded machine a connection can be idle for this time before its first frame.
  const auto hits = [&] {
    return StatusesOf(Fetch(to.Request()).Wait()) == std::vector{PageStatus::kHit};
  };
  ASSERT_TRUE(Eventually(hits));
  const uint64_t failed = client_->stats().connections_failed;
  EXPECT_TRUE(Eventually(
      [&] { return client_->stats().connections == 0 && server_->stats().connections == 0; }));
  EXPECT_EQ(client_->stats().connections_failed, failed);
  EXPECT_TRUE(Eventually(hits));
}

TEST_P(TransportContract, StopEndsEverything) {
  source_.Add(1, {kWhole}, kTileBytes);
  source_.Hold();
  Start();
  Destination to;
  to.Want(1, kWhole, kTileBytes);
  PendingFetch fetch = Fetch(to.Request());
  client_->Stop();
  EXPECT_THAT(StatusesOf(fetch.Wait()), ElementsAre(PageStatus::kUnavailable));
  EXPECT_TRUE(to.released());
  EXPECT_EQ(Fetch(to.Request()).status().code(), absl::StatusCode::kFailedPrecondition);
  client_->Stop();
  server_->Stop();
  source_.ReplyAll();
  EXPECT_EQ(source_.leases(), 0);
}

TEST_P(TransportContract, AThousandPagesInOneFetch) {
  constexpr TileRange kFour = {{0, 2}, {0, 2}};
  for (int page = 0; page < 1000; page += 2) source_.Add(page, {kFour}, 256);
  Start();
  Destination to;
  for (int page = 0; page < 1000; ++page) to.Want(page, kFour, 256);
  const FetchResponse response = Fetch(to.Request()).Wait();
  ASSERT_EQ(response.pages.size(), 1000u);
  for (size_t page = 0; page < 1000; ++page) {
    ASSERT_EQ(response.pages[page].status, page % 2 == 0 ? PageStatus::kHit : PageStatus::kAbsent);
  }
  EXPECT_EQ(to.FirstWrong(response.pages), -1);
}

TEST_P(TransportContract, DoneMayFetchAgain) {
  source_.Add(1, {kWhole}, kTileBytes);
  Start();
  Destination to;
  to.Want(1, kWhole, kTileBytes);
  std::promise<int> hits;
  std::function<void(int)> next = [&](int left) {
    const auto started =
        client_->Fetch(server_->address(), to.Request(), [&, left](const FetchResponse& response) {
          if (response.pages[0].status != PageStatus::kHit) return hits.set_value(-left);
          if (left == 0) return hits.set_value(100);
          next(left - 1);
        });
    if (!started.ok()) hits.set_value(-1000);
  };
  next(99);
  auto result = hits.get_future();
  ASSERT_EQ(result.wait_for(std::chrono::seconds(30)), std::future_status::ready);
  EXPECT_EQ(result.get(), 100);
  EXPECT_EQ(client_->stats().connections_opened, 1u);
}

// Many threads fetch arbitrary ranges with deadlines and cancels; every hit has the right bytes.
TEST_P(TransportContract, HitsAreRightUnderLoad) {
  for (int page = 0; page < 20; ++page) {
    source_.Add(page, {{{0, 3}, {0, 4}}, {{3, 6}, {0, 4}}}, kTileBytes);
  }
  Start();
  std::atomic<int> hits{0}, wrong{0};
  std::vector<std::thread> threads;
  for (int thread = 0; thread < 4; ++thread) {
    threads.emplace_back([&, thread] {
      std::mt19937 random(static_cast<unsigned>(thread));
      for (int i = 0; i < 50; ++i) {
        Destination to;
        for (int page = 0; page < 4; ++page) {
          const auto layer = static_cast<uint16_t>(random() % 6);
          const auto head = static_cast<uint16_t>(random() % 4);
          to.Want(static_cast<int>(random() % 20),
                  {{layer, static_cast<uint16_t>(layer + 1 + random() % (6u - layer))},
                   {head, static_cast<uint16_t>(head + 1 + random() % (4u - head))}},
                  kTileBytes);
        }
        FetchRequest request = to.Request();
        if (i % 7 == 0) request.deadline = Clock::Real().Now() + std::chrono::microseconds(200);
        PendingFetch fetch = Fetch(request);
        if (i % 11 == 0) client_->Cancel(fetch.id());
        const FetchResponse response = fetch.Wait();
        for (const PageResponse& page : response.pages) hits += page.status == PageStatus::kHit;
        wrong += to.FirstWrong(response.pages) != -1;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
  EXPECT_GT(hits, 4 * 30 * 4);
  EXPECT_TRUE(Eventually([&] { return source_.leases() == 0; }));
  EXPECT_TRUE(Eventually([&] { return client_->stats().quarantine_bytes == 0; }));
}

INSTANTIATE_TEST_SUITE_P(All, TransportContract,
                         ::testing::Values(Kind::kLoopback, Kind::kUcxEager, Kind::kUcxRendezvous),
                         [](const auto& kind) {
                           switch (kind.param) {
                             case Kind::kLoopback:
                               return "Loopback";
                             case Kind::kUcxEager:
                               return "UcxEager";
                             default:
                               return "UcxRendezvous";
                           }
                         });

}  // namespace
}  // namespace crumb::transport
