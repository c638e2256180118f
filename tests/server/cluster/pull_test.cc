// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
// RemoteReader over peers that respond when the test says so: which nodes are queried, for which
// pages, and how it treats responses that are late, wrong or missing.
#include <gmock/gmock.h>

#include <atomic>
#include <future>
#include <thread>

#include "common/crc32c.h"
#include "common/sha256.h"
#include "server/cluster/peer_calls.h"
#include "server/cluster/pull_operation.h"
#include "server/cluster/remote_reader.h"
#include "server/cluster/run_finder.h"
#include "tests/common/eventually.h"
#include "tests/server/cluster/pull_fixture.h"
#include "tests/server/latency.h"

namespace crumb::server {
namespace {

TEST_F(PullTest, EveryPageComesWithOneCallANode) {
  const PullResult result = Pull(Request(0, 200));
  EXPECT_EQ(result.pages, 200u);
  EXPECT_EQ(result.miss_reason, MissReason::kNone);
  EXPECT_EQ(Sum(&FakePeer::runs_requested), 7);  // ceil(200 / 32)
  EXPECT_LE(Sum(&FakePeer::queries), kPeers);
  for (const auto& fake : fakes_) EXPECT_LE(fake->queries.load(), 1);
  EXPECT_EQ(Sum(&FakePeer::pages_fetched), 200);
  storage::AcquireRequest check;
  check.keyspace = keyspace_->id;
  check.generation = 1;
  for (int i = 0; i < 200; ++i) check.keys.push_back(Key(i));
  check.range = kGeometry.all_tiles();
  EXPECT_EQ(store_.Lookup(check).hit_pages, 200u);
}

TEST_F(PullTest, LeasesOfPeersAreGivenBack) {
  Pull(Request(0, 100));
  steps_.Stop();
  int leases = 0;
  for (const auto& fake : fakes_) leases += static_cast<int>(fake->leases.load());
  EXPECT_EQ(Sum(&FakePeer::released), leases);
}

TEST_F(PullTest, PagesThatAreHereAlreadyAreNotRequested) {
  for (int i = 32; i < 64; ++i) Store(Key(i));
  EXPECT_EQ(Pull(Request(0, 70)).pages, 70u);
  EXPECT_EQ(Sum(&FakePeer::pages_fetched), 38);
}

TEST_F(PullTest, AMissEndsThePrefixAndNothingBehindItIsWaitedFor) {
  for (const auto& fake : fakes_) fake->hits_max = 10;
  const PullResult result = Pull(Request(0, 64));
  EXPECT_EQ(result.pages, 10u);
  EXPECT_EQ(result.miss_reason, MissReason::kAbsent);
}

TEST_F(PullTest, ARunInTheMiddleIsNamedByItsFirstPage) {
  PullRequest request = Request(40, 8);
  EXPECT_EQ(RunsOf(request).at(0).key, Key(32));
  request.run = PageKey();
  EXPECT_TRUE(RunsOf(request).empty());
  EXPECT_EQ(Pull(std::move(request)).pages, 0u);
  EXPECT_EQ(Sum(&FakePeer::queries), 0);
}

TEST_F(PullTest, SilenceIsAMissAtTheDeadline) {
  for (const auto& fake : fakes_) fake->silent = true;
  const TimePoint began = Clock::Real().Now();
  const PullResult result = Pull(Request(0, 64, std::chrono::milliseconds(50)));
  EXPECT_EQ(result.pages, 0u);
  EXPECT_EQ(result.miss_reason, MissReason::kDeadline);
  EXPECT_GE(Clock::Real().Now() - began, std::chrono::milliseconds(50));
  EXPECT_EQ(counts_.pulls_late.value(), 1u);
  for (const auto& fake : fakes_) fake->RespondLate();
}

TEST_F(PullTest, AnOpenBreakerIsSkipped) {
  for (const auto& fake : fakes_) {
    fake->breaker().Fail(Breaker::Of::kCalls);
    fake->breaker().Fail(Breaker::Of::kCalls);
  }
  const PullResult result = Pull(Request(0, 64));
  EXPECT_EQ(result.pages, 0u);
  EXPECT_EQ(Sum(&FakePeer::queries), 0);
  EXPECT_GT(counts_.breaker_skips.value(), 0u);
}

// Two pulls, one after the other: a node's breaker opens at two failures, whatever its responses
// say between them.
TEST_F(PullTest, OnlyANodeNoneOfWhosePagesComesInTimeFails) {
  int begin = 0;
  for (const size_t in_time : {1, 0}) {
    for (int pull = 0; pull < 2; ++pull, begin += 640) {
      for (const auto& fake : fakes_) {
        fake->late_behind = in_time;
        fake->hold_fetches = true;
      }
      std::promise<PullResult> pulled;
      reader_.Pull(Request(begin, 640), [&](PullResult result) { pulled.set_value(result); });
      for (const auto& fake : fakes_) {
        ASSERT_TRUE(Eventually([&] { return fake->fetches_held() == 1; }));
      }
      for (const auto& fake : fakes_) fake->CompleteHeldFetches();
      EXPECT_LT(pulled.get_future().get().pages, 640u);
      // A pull may end before the nodes behind its prefix's end have been judged.
      EXPECT_TRUE(Eventually([&] {
        return counts_.pulled_pages.value() + counts_.pull_failed_pages.value() ==
               static_cast<uint64_t>(Sum(&FakePeer::pages_fetched));
      }));
    }
    for (const auto& fake : fakes_) {
      const auto expected = in_time == 0 ? Breaker::State::kOpen : Breaker::State::kClosed;
      EXPECT_TRUE(Eventually([&] { return fake->breaker().state() == expected; })) << fake->id();
    }
  }
}

TEST_F(PullTest, ResponsesThatDoNotFitAreNone) {
  for (const auto& fake : fakes_) fake->nonsense = true;
  EXPECT_EQ(Pull(Request(0, 40)).pages, 0u);
  EXPECT_EQ(Sum(&FakePeer::fetches), 0);
}

TEST_F(PullTest, ATileSizeThatIsNotTheKeyspacesIsNeverFetched) {
  for (const auto& fake : fakes_) fake->tile_bytes = 64;
  const PullResult result = Pull(Request(0, 40));
  EXPECT_EQ(result.pages, 0u);
  EXPECT_EQ(result.miss_reason, MissReason::kCorrupt);
  EXPECT_EQ(Sum(&FakePeer::pages_fetched), 0);
}

TEST_F(PullTest, PagesThatWereNotRequestedAreNotStored) {
  for (const auto& fake : fakes_) fake->wrong_key = true;
  const PullResult result = Pull(Request(0, 3));
  EXPECT_EQ(result.pages, 0u);
  EXPECT_EQ(result.miss_reason, MissReason::kCorrupt);
  steps_.Stop();  // the prefix's end is known before every page has ended
  EXPECT_EQ(counts_.pull_corrupt_pages.value(), 3u);
}

TEST_F(PullTest, TheSamePagesAreFetchedOnceHoweverManyReadersRequestThem) {
  for (const auto& fake : fakes_) fake->hold_fetches = true;
  constexpr int kRequests = 4;
  std::atomic<int> completed{0};
  std::vector<std::promise<PullResult>> results(kRequests);
  for (int i = 0; i < kRequests; ++i) {
    // Later ones want more.
    reader_.Pull(Request(0, 32 + i), [&results, &completed, i](PullResult result) {
      ++completed;
      results[static_cast<size_t>(i)].set_value(result);
    });
  }
  EXPECT_EQ(completed.load(), 0);
  for (const auto& fake : fakes_) fake->hold_fetches = false;
  while (completed.load() < kRequests) {
    for (const auto& fake : fakes_) fake->CompleteHeldFetches();
    std::this_thread::yield();
  }
  for (int i = 0; i < kRequests; ++i) {
    EXPECT_EQ(results[static_cast<size_t>(i)].get_future().get().pages,
              static_cast<size_t>(32 + i));
  }
  EXPECT_EQ(Sum(&FakePeer::pages_fetched), 35);
  EXPECT_GE(counts_.pull_coalesced_pages.value(), 32u * 3);
}

TEST_F(PullTest, OverTheBoundIsAMissAtOnce) {
  for (const auto& fake : fakes_) fake->hold_fetches = true;
  std::atomic<int> open{0};
  for (int i = 0; i < 4; ++i) {
    ++open;
    reader_.Pull(Request(i * 1000 - i * 1000 % 32, 8), [&open](PullResult) { --open; });
  }
  const PullResult result = Pull(Request(9600, 8));
  EXPECT_EQ(result.miss_reason, MissReason::kBusy);
  EXPECT_EQ(counts_.pulls_refused.value(), 1u);
  while (open.load() > 0) {
    for (const auto& fake : fakes_) fake->CompleteHeldFetches();
    std::this_thread::yield();
  }
}

// Pulls of one tenant wait for a node that does not respond.
TEST_F(PullTest, ATenantTakesOnlyItsPartOfThePulls) {
  constexpr size_t kPulls = 4, kPerTenant = 3;
  RemoteReader reader({store_, peers_, flights_, timer_, steps_, Clock::Real(), counts_, 1024,
                       [](const std::string&) {}},
                      kPulls, kPerTenant);
  const auto of = [&](const std::string& tenant, int first) {
    keyspace_->tenant = tenant;  // it is read when the pull begins
    return Request(first, 8);
  };
  const auto pull = [&](PullRequest request) {
    std::promise<PullResult> completed;
    reader.Pull(std::move(request), [&](PullResult result) { completed.set_value(result); });
    return completed.get_future().get();
  };
  for (const auto& fake : fakes_) fake->hold_fetches = true;
  std::atomic<size_t> open{0};
  for (size_t i = 0; i < kPerTenant; ++i) {
    ++open;
    reader.Pull(of("a", static_cast<int>(i) * 1024), [&open](PullResult) { --open; });
  }
  EXPECT_EQ(pull(of("a", 8192)).miss_reason, MissReason::kBusy);
  EXPECT_EQ(counts_.pulls_refused.value(), 1u);
  EXPECT_EQ(open.load(), kPerTenant) << "they wait";
  ASSERT_TRUE(Eventually([&] {
    size_t held = 0;
    for (const auto& fake : fakes_) held += fake->fetches_held();
    return held == kPerTenant;
  }));
  for (const auto& fake : fakes_) fake->hold_fetches = false;
  // Not the pages of "a", whose fetches would be shared and are held.
  constexpr int kPullsOfB = 16, kFirstOfB = 16384;
  for (int i = 0; i < kPullsOfB; ++i) {
    const double seconds =
        SecondsOf([&] { EXPECT_EQ(pull(of("b", kFirstOfB + i * 32)).pages, 8u); });
    EXPECT_LT(seconds, 1) << "pull " << i;
  }
  EXPECT_EQ(counts_.pulls_refused.value(), 1u);
  while (open.load() > 0) {
    for (const auto& fake : fakes_) fake->CompleteHeldFetches();
    std::this_thread::yield();
  }
}

TEST_F(PullTest, AHomeSaysWhichOfferedPagesItDidNotTakeAndWhy) {
  Store(Key(1));
  fakes_[0]->corrupt = Key(2);
  const PeerCallContext context = PeerCalls();
  v1::PeerPushRequest request;
  request.mutable_caller()->set_node("peer-0");
  request.mutable_caller()->set_wire_version(kWireMax);
  request.mutable_keyspace()->set_keyspace(std::string(keyspace_->id.view()));
  request.mutable_range()->set_layer_end(static_cast<uint32_t>(kGeometry.layers));
  request.mutable_range()->set_head_end(static_cast<uint32_t>(kGeometry.kv_heads));
  request.set_session(std::string(16, 's'));
  request.set_keys(Keys(0, 4));
  for (int i = 0; i < 4; ++i) {
    request.add_tile_bytes(i == 3 ? 64 : kGeometry.int2_tile_bytes());  // no page has such tiles
  }
  v1::PeerPushResponse response;
  std::promise<absl::Status> completed;
  PeerPush(context, request, Clock::Real().Now() + std::chrono::seconds(30), &response,
           [&](const absl::Status& status) { completed.set_value(status); });
  EXPECT_TRUE(completed.get_future().get().ok());
  EXPECT_EQ(response.stored(), 1u);
  EXPECT_EQ(response.deduplicated(), 1u);
  EXPECT_EQ(response.failed(), 2u);
  EXPECT_THAT(response.failed_pages(), testing::ElementsAre(2u, 3u));
  EXPECT_THAT(response.failed_reasons(),
              testing::ElementsAre(v1::MISS_REASON_CORRUPT, v1::MISS_REASON_CORRUPT));
  // A caller that is not known yet gets an error and tries again later.
  request.mutable_caller()->set_node("a stranger");
  std::promise<absl::Status> refused;
  PeerPush(context, request, Clock::Real().Now() + std::chrono::seconds(30), &response,
           [&](const absl::Status& status) { refused.set_value(status); });
  EXPECT_TRUE(absl::IsAborted(refused.get_future().get()));
}

// A message would hold any number of them.
TEST_F(PullTest, PeersThatNameNoPageAreRefused) {
  const PeerCallContext context = PeerCalls();
  const TimePoint deadline = Clock::Real().Now() + std::chrono::seconds(30);
  std::vector<absl::Status> replies;
  const PeerDone done = [&](const absl::Status& status) { replies.push_back(status); };
  const std::string keyspace(keyspace_->id.view());
  v1::PeerCaller caller;
  caller.set_node("peer-0");
  caller.set_wire_version(kWireMax);
  v1::TileRange range;
  range.set_layer_end(static_cast<uint32_t>(kGeometry.layers));
  range.set_head_end(static_cast<uint32_t>(kGeometry.kv_heads));

  v1::PeerAcquireRequest acquire;
  *acquire.mutable_caller() = caller;
  acquire.set_keyspace(keyspace);
  acquire.set_generation(keyspace_->generation.load());
  *acquire.mutable_range() = range;
  v1::PeerAcquireResponse acquired;
  PeerAcquire(context, acquire, deadline, &acquired, done);
  EXPECT_TRUE(replies.back().ok());  // the offer that makes the node request a session
  acquire.add_runs(Keys(0, 1));
  acquire.add_runs("");
  PeerAcquire(context, acquire, deadline, &acquired, done);
  EXPECT_TRUE(absl::IsInvalidArgument(replies.back()));

  v1::PeerPushRequest push;
  *push.mutable_caller() = caller;
  push.mutable_keyspace()->set_keyspace(keyspace);
  *push.mutable_range() = range;
  push.set_session(std::string(16, 's'));
  v1::PeerPushResponse pushed;
  PeerPush(context, push, deadline, &pushed, done);
  EXPECT_TRUE(absl::IsInvalidArgument(replies.back()));
  EXPECT_EQ(replies.size(), 3u);

  v1::PeerReadRequest read;
  read.set_session(std::string(16, 's'));
  read.set_keyspace(keyspace);
  *read.mutable_range() = range;
  EXPECT_TRUE(absl::IsInvalidArgument(SourceRequestOf(context, read, deadline).status()));
  read.set_keys(Keys(0, 1));
  EXPECT_TRUE(SourceRequestOf(context, read, deadline).ok());
}

TEST_F(PullTest, FindReportsWhoHasWhatWithOneCallANodeAndMovesNothing) {
  for (int i = 40; i < 50; ++i) Store(Key(i));
  const FoundPages found = Find(Request(0, 200));
  ASSERT_EQ(found.tiers.size(), 200u);
  EXPECT_EQ(found.miss_reason, MissReason::kNone);
  ASSERT_EQ(found.page_nodes.size(), 190u);
  size_t remote = 0;
  for (int i = 0; i < 200; ++i) {
    if (i >= 40 && i < 50) {
      EXPECT_EQ(found.tiers[static_cast<size_t>(i)], Tier::kHost);
      continue;
    }
    EXPECT_EQ(found.tiers[static_cast<size_t>(i)], Tier::kRemote);
    const PageKey run = Key(i / static_cast<int>(kRunPages) * static_cast<int>(kRunPages));
    EXPECT_EQ(found.nodes.at(found.page_nodes[remote++]), peers_.HomesToQuery(run).at(0)->id());
  }
  for (const auto& fake : fakes_) {
    EXPECT_LE(fake->queries.load(), 1);
    EXPECT_EQ(fake->leases.load(), 0u);
  }
  EXPECT_EQ(Sum(&FakePeer::fetches), 0);
  EXPECT_EQ(counts_.finds.value(), 1u);
  EXPECT_EQ(counts_.pulls.value(), 0u);
}

TEST_F(PullTest, FindEndsWithThePrefix) {
  for (const auto& fake : fakes_) fake->hits_max = 10;
  const FoundPages found = Find(Request(0, 64));
  EXPECT_EQ(found.tiers.size(), 10u);
  EXPECT_EQ(found.miss_reason, MissReason::kAbsent);
  for (const auto& fake : fakes_) fake->absent = true;
  EXPECT_EQ(Find(Request(0, 64)).tiers.size(), 0u);
}

TEST_F(PullTest, FindEndsAtItsDeadline) {
  for (const auto& fake : fakes_) fake->silent = true;
  const FoundPages found = Find(Request(0, 64, std::chrono::milliseconds(50)));
  EXPECT_EQ(found.tiers.size(), 0u);
  EXPECT_EQ(found.miss_reason, MissReason::kDeadline);
  EXPECT_EQ(counts_.pulls_late.value(), 1u);
  // Later responses are ignored.
  for (const auto& fake : fakes_) fake->RespondLate();
}

TEST_F(PullTest, FindTakesResponsesThatDoNotFitForNone) {
  for (const auto& fake : fakes_) fake->nonsense = true;
  EXPECT_EQ(Find(Request(0, 40)).tiers.size(), 0u);
  EXPECT_GT(counts_.pull_acquire_failures.value(), 0u);
}

TEST_F(PullTest, ARunThatIsNotKnownIsFoundByQueryingEveryNode) {
  PullRequest request = Request(40, 8);
  request.run = PageKey();
  EXPECT_EQ(Find(request).tiers.size(), 0u);
  request.everyone = true;
  EXPECT_EQ(Find(request).tiers.size(), 8u);
  EXPECT_EQ(Sum(&FakePeer::queries), kPeers);
  EXPECT_EQ(Pull(request).pages, 8u);
  EXPECT_EQ(Sum(&FakePeer::queries), 2 * kPeers);
  EXPECT_EQ(Sum(&FakePeer::pages_fetched), 8);
}

TEST_F(PullTest, FetchesThatNoRequestWaitsForLeaveRoomToOthers) {
  for (const auto& fake : fakes_) fake->hold_fetches = true;
  std::atomic<int> open{0};
  std::vector<MissReason> refused;
  for (int i = 0; i < 3; ++i) {
    PullRequest request = Request(i * 32, 8);
    request.awaited = false;
    ++open;
    reader_.Pull(std::move(request), [&](PullResult result) {
      if (result.miss_reason == MissReason::kBusy) refused.push_back(result.miss_reason);
      --open;
    });
  }
  EXPECT_EQ(refused.size(), 1u);  // half of 4 are taken
  ++open;
  reader_.Pull(Request(96, 8), [&open](PullResult result) {
    EXPECT_EQ(result.pages, 8u);
    --open;
  });
  while (open.load() > 0) {
    for (const auto& fake : fakes_) fake->CompleteHeldFetches();
    std::this_thread::yield();
  }
}

TEST_F(PullTest, RunsAreFoundFromPositionParentAndRoot) {
  RunFinder runs(store_, 16);
  FragmentHeader header;
  header.keyspace = keyspace_->id;
  header.key = Key(0);
  EXPECT_EQ(runs.Find(header), Key(0));  // has no parent, so it is the first
  header.key = Key(64);
  header.parent = Key(63);
  header.position = 65;
  EXPECT_EQ(runs.Find(header), Key(64));
  header.key = Key(65);
  header.parent = Key(64);
  header.position = 0;
  EXPECT_EQ(runs.Find(header), Key(64));  // remembered
  header.key = Key(200);
  header.parent = Key(199);
  header.position = 201;
  EXPECT_EQ(runs.Find(header), std::nullopt);  // its ancestors are not here
}

}  // namespace
}  // namespace crumb::server
