// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "server/calls/lease_calls.h"

#include <random>

#include "gmock/gmock.h"
#include "server/calls/get_reader.h"
#include "server/calls/page_calls.h"
#include "tests/server/call_fixture.h"

namespace crumb::server {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

SessionLimits SmallBudget() {
  SessionLimits limits;
  limits.lease_pages_max = 10;
  limits.leases_max = 3;
  return limits;
}

class LeaseCallsTest : public CallFixture {
 protected:
  LeaseCallsTest() : CallFixture({}, SmallBudget()) {
    for (int i = 0; i < 8; ++i) Store(Key(i));
  }

  v1::AcquireRequest Request(int first, int count) const {
    v1::AcquireRequest request;
    request.set_keyspace(std::string(keyspace_->id.view()));
    request.set_keys(Keys(first, count));
    return request;
  }

  absl::Status Run(const std::shared_ptr<Session>& session, const v1::AcquireRequest& request,
                   v1::AcquireResponse* response) {
    Completion completion;
    Acquire(context_, session, TimePoint::max(), request, response, completion.done());
    EXPECT_EQ(completion.times, 1);
    return completion.status;
  }

  absl::Status LookUp(const v1::LookupRequest& request, v1::LookupResponse* response) {
    Completion completion;
    response->Clear();
    Lookup(context_, TimePoint::max(), request, response, completion.done());
    EXPECT_EQ(completion.times, 1);
    return completion.status;
  }

  uint64_t Tokens(TokenTier tier) const { return metrics_.tokens.Total(tier); }
  uint64_t AllTokens() const {
    uint64_t all = 0;
    for (int tier = 0; tier < kTokenTierCount; ++tier) all += Tokens(static_cast<TokenTier>(tier));
    return all;
  }
};

TEST_F(LeaseCallsTest, ReturnsWhereThePrefixLies) {
  const auto session = OpenSession();
  v1::AcquireResponse response;
  ASSERT_TRUE(Run(session, Request(5, 4), &response).ok());
  EXPECT_NE(response.lease(), 0u);
  EXPECT_EQ(response.hit_pages(), 3u);
  EXPECT_EQ(response.miss_reason(), v1::MISS_REASON_ABSENT);
  EXPECT_THAT(response.page_tiers(), ElementsAre(v1::TIER_HOST, v1::TIER_HOST, v1::TIER_HOST));
  EXPECT_THAT(response.fragments().pages(), ElementsAre(0, 1, 2));
  EXPECT_THAT(response.fragments().header_offsets(),
              ElementsAre(tiles_bytes(), tiles_bytes(), tiles_bytes()));
  EXPECT_EQ(store_.Stats().leases, 1u);
}

TEST_F(LeaseCallsTest, TheTokenTiersSumToAllRequestedTokens) {
  std::mt19937 random(7);
  uint64_t requested = 0;
  for (int i = 0; i < 200; ++i) {
    const auto session = OpenSession(0);
    v1::AcquireRequest request =
        Request(static_cast<int>(random() % 9), 1 + static_cast<int>(random() % 12));
    request.set_window_tokens(random() % 320);
    v1::AcquireResponse response;
    ASSERT_TRUE(Run(session, request, &response).ok());
    requested += request.keys().size() / 32 * kPageTokens + request.window_tokens();
    ASSERT_EQ(AllTokens(), requested);
    sessions_.End(session);
  }
  EXPECT_GT(Tokens(TokenTier::kHost), 0u);
  EXPECT_GT(Tokens(TokenTier::kMiss), 0u);
  EXPECT_GT(Tokens(TokenTier::kWindow), 0u);
  EXPECT_EQ(metrics_.fetched_tokens[static_cast<size_t>(TokenTier::kHost)].value(),
            Tokens(TokenTier::kHost));
}

TEST_F(LeaseCallsTest, KeysBehindAMissAreCountedAndNotLookedFor) {
  const auto session = OpenSession();
  v1::AcquireRequest request = Request(0, 3);  // all of them are there
  request.set_window_tokens(300);
  request.set_behind_miss(true);
  v1::AcquireResponse response;
  ASSERT_TRUE(Run(session, request, &response).ok());
  EXPECT_EQ(response.lease(), 0u);
  EXPECT_EQ(response.hit_pages(), 0u);
  EXPECT_EQ(response.miss_reason(), v1::MISS_REASON_ABSENT);
  EXPECT_EQ(store_.Stats().leases, 0u);
  EXPECT_EQ(Tokens(TokenTier::kMiss), 3u * kPageTokens);
  EXPECT_EQ(Tokens(TokenTier::kWindow), 300u);
  EXPECT_EQ(AllTokens(), 3u * kPageTokens + 300u);
  const auto requested_keys = [&] {
    return metrics_.requested_pages.Read(context_.clock.Now()).front().requested_pages;
  };
  EXPECT_EQ(requested_keys(), 3u);
  // They took nothing off the engine's budget.
  request.set_behind_miss(false);
  ASSERT_TRUE(Run(session, request, &response).ok());
  EXPECT_EQ(response.hit_pages(), 3u);
  EXPECT_EQ(requested_keys(), 6u);
}

TEST_F(LeaseCallsTest, ReleaseEndsTheLeaseForAllProcessesOfTheEngine) {
  const auto a = OpenSession();
  const auto b = OpenSession(0, std::string(a->engine().id().view()));
  const auto stranger = OpenSession();
  v1::AcquireResponse leased;
  ASSERT_TRUE(Run(a, Request(0, 2), &leased).ok());
  v1::ReleaseRequest request;
  request.add_leases(leased.lease());
  v1::ReleaseResponse response;
  ASSERT_TRUE(Release(context_, *stranger, request, &response).ok());
  EXPECT_EQ(response.unknown(), 1u);
  EXPECT_EQ(store_.Stats().leases, 1u);
  ASSERT_TRUE(Release(context_, *b, request, &response).ok());
  EXPECT_EQ(response.unknown(), 0u);
  EXPECT_EQ(store_.Stats().leases, 0u);
  ASSERT_TRUE(Release(context_, *b, request, &response).ok());
  EXPECT_EQ(response.unknown(), 1u);
}

TEST_F(LeaseCallsTest, AnotherSessionOfTheEngineJoinsALease) {
  const auto leader = OpenSession();
  const std::string engine(leader->engine().id().view());
  const auto follower = OpenSession(0, engine);
  const auto bystander = OpenSession(0, engine);
  const auto stranger = OpenSession();
  v1::AcquireResponse leased, joined;
  ASSERT_TRUE(Run(leader, Request(0, 3), &leased).ok());
  const uint64_t tokens = AllTokens();
  v1::AcquireRequest join = Request(0, 3);
  join.set_lease(leased.lease());
  ASSERT_TRUE(Run(follower, join, &joined).ok());
  EXPECT_EQ(joined.lease(), leased.lease());
  EXPECT_EQ(joined.hit_pages(), 3u);
  EXPECT_EQ(joined.fragments().SerializeAsString(), leased.fragments().SerializeAsString());
  EXPECT_EQ(AllTokens(), tokens);
  EXPECT_EQ(leader->engine().pages(), 3u);  // counted once in the budget

  ASSERT_TRUE(Run(stranger, join, &joined).ok());
  EXPECT_EQ(joined.hit_pages(), 0u);
  EXPECT_EQ(joined.miss_reason(), v1::MISS_REASON_ABSENT);

  // A session that does not hold it cannot end it for those that do.
  v1::ReleaseRequest request;
  request.add_leases(leased.lease());
  v1::ReleaseResponse response;
  ASSERT_TRUE(Release(context_, *leader, request, &response).ok());
  EXPECT_EQ(response.unknown(), 0u);
  ASSERT_TRUE(Release(context_, *bystander, request, &response).ok());
  EXPECT_EQ(response.unknown(), 1u);
  EXPECT_EQ(store_.Stats().leases, 1u);
  ASSERT_TRUE(Release(context_, *follower, request, &response).ok());
  EXPECT_EQ(response.unknown(), 0u);
  EXPECT_EQ(store_.Stats().leases, 0u);
  EXPECT_EQ(leader->engine().pages(), 0u);
  ASSERT_TRUE(Run(follower, join, &joined).ok());
  EXPECT_EQ(joined.hit_pages(), 0u);
}

TEST_F(LeaseCallsTest, AFollowerThatReleasesTwiceLeavesTheLeadersHold) {
  const auto leader = OpenSession();
  const auto follower = OpenSession(0, std::string(leader->engine().id().view()));
  v1::AcquireResponse leased, joined;
  ASSERT_TRUE(Run(leader, Request(0, 3), &leased).ok());
  v1::AcquireRequest join = Request(0, 3);
  join.set_lease(leased.lease());
  v1::ReleaseRequest release;
  release.add_leases(leased.lease());
  v1::ReleaseResponse response;
  for (int round = 0; round < 2; ++round) {
    ASSERT_TRUE(Run(follower, join, &joined).ok());
    EXPECT_EQ(joined.hit_pages(), 3u);
    for (const uint32_t unknown : {0, 1, 1}) {
      ASSERT_TRUE(Release(context_, *follower, release, &response).ok());
      EXPECT_EQ(response.unknown(), unknown);
      EXPECT_EQ(store_.Stats().leases, 1u);
    }
  }
  // The session that acquired it may join it as well, and then releases both.
  ASSERT_TRUE(Run(leader, join, &joined).ok());
  ASSERT_TRUE(Release(context_, *leader, release, &response).ok());
  EXPECT_EQ(store_.Stats().leases, 1u);
  ASSERT_TRUE(Release(context_, *leader, release, &response).ok());
  EXPECT_EQ(response.unknown(), 0u);
  EXPECT_EQ(store_.Stats().leases, 0u);
}

TEST_F(LeaseCallsTest, AFollowerThatDiesHoldsNothing) {
  const auto leader = OpenSession();
  const auto follower = OpenSession(0, std::string(leader->engine().id().view()));
  v1::AcquireResponse leased, joined;
  ASSERT_TRUE(Run(leader, Request(0, 3), &leased).ok());
  v1::AcquireRequest join = Request(0, 3);
  join.set_lease(leased.lease());
  ASSERT_TRUE(Run(follower, join, &joined).ok());
  ASSERT_TRUE(Run(follower, join, &joined).ok());  // two sequences of one process
  sessions_.End(follower);
  EXPECT_EQ(store_.Stats().leases, 1u);
  v1::ReleaseRequest request;
  request.add_leases(leased.lease());
  v1::ReleaseResponse response;
  ASSERT_TRUE(Release(context_, *leader, request, &response).ok());
  EXPECT_EQ(store_.Stats().leases, 0u);
  EXPECT_EQ(leader->engine().leases(), 0u);
}

TEST_F(LeaseCallsTest, AJoinWhoseCallerGaveItUpHoldsNothing) {
  const auto leader = OpenSession();
  const auto follower = OpenSession(0, std::string(leader->engine().id().view()));
  v1::AcquireResponse leased, joined;
  ASSERT_TRUE(Run(leader, Request(0, 3), &leased).ok());
  v1::AcquireRequest join = Request(0, 3);
  join.set_lease(leased.lease());
  for (const bool before : {true, false}) {
    join.set_request(before ? 7 : 8);
    v1::ReleaseRequest give_up;
    give_up.add_requests(join.request());
    v1::ReleaseResponse response;
    if (before) {
      ASSERT_TRUE(Release(context_, *follower, give_up, &response).ok());
    }
    EXPECT_EQ(Run(follower, join, &joined).ok(), !before);
    if (!before) {
      ASSERT_TRUE(Release(context_, *follower, give_up, &response).ok());
    }
    EXPECT_FALSE(follower->TakeJoined(leased.lease()));
  }
  EXPECT_EQ(store_.Stats().leases, 1u);
}

TEST_F(LeaseCallsTest, TheBudgetOfPagesCutsThePrefix) {
  const auto session = OpenSession();
  v1::AcquireResponse first;
  ASSERT_TRUE(Run(session, Request(0, 8), &first).ok());
  EXPECT_EQ(first.hit_pages(), 8u);
  v1::AcquireResponse second;
  ASSERT_TRUE(Run(session, Request(0, 8), &second).ok());
  EXPECT_EQ(second.hit_pages(), 2u);
  EXPECT_EQ(second.miss_reason(), v1::MISS_REASON_BUSY);
  v1::AcquireResponse third;
  ASSERT_TRUE(Run(session, Request(0, 8), &third).ok());
  EXPECT_EQ(third.hit_pages(), 0u);
  EXPECT_EQ(third.lease(), 0u);
  EXPECT_EQ(third.miss_reason(), v1::MISS_REASON_BUSY);
  EXPECT_EQ(session->engine().pages(), 10u);
  v1::ReleaseRequest request;
  request.add_leases(first.lease());
  request.add_leases(second.lease());
  v1::ReleaseResponse response;
  ASSERT_TRUE(Release(context_, *session, request, &response).ok());
  EXPECT_EQ(session->engine().pages(), 0u);
}

TEST_F(LeaseCallsTest, TheBudgetOfLeasesIsABound) {
  const auto session = OpenSession();
  v1::AcquireResponse response;
  for (int i = 0; i < 3; ++i) ASSERT_TRUE(Run(session, Request(i, 1), &response).ok());
  response.Clear();
  ASSERT_TRUE(Run(session, Request(0, 1), &response).ok());
  EXPECT_EQ(response.miss_reason(), v1::MISS_REASON_BUSY);
}

TEST_F(LeaseCallsTest, AMissTakesNothingOffTheBudget) {
  const auto session = OpenSession();
  for (int i = 0; i < 50; ++i) {
    v1::AcquireResponse response;
    ASSERT_TRUE(Run(session, Request(100, 10), &response).ok());
    EXPECT_EQ(response.hit_pages(), 0u);
  }
  EXPECT_EQ(session->engine().pages(), 0u);
  v1::AcquireResponse response;
  ASSERT_TRUE(Run(session, Request(0, 1), &response).ok());
  EXPECT_EQ(response.hit_pages(), 1u);
}

TEST_F(LeaseCallsTest, BadInputNamesFieldAndBound) {
  const auto session = OpenSession();
  v1::AcquireResponse response;
  const auto error = [&](const v1::AcquireRequest& request) {
    const absl::Status status = Run(session, request, &response);
    return status.ToString();
  };
  v1::AcquireRequest request = Request(0, 2);
  request.set_keys("short");
  EXPECT_THAT(error(request), testing::AllOf(HasSubstr("INVALID_ARGUMENT"), HasSubstr("keys")));
  request.clear_keys();
  EXPECT_THAT(error(request), HasSubstr("keys has 0 bytes"));
  request.set_keys(std::string(32 * 100'000, 'k'));
  EXPECT_THAT(error(request),
              HasSubstr("keys has 100000 entries, limits.acquire_keys_max allows 16384"));
  request = Request(0, 2);
  request.set_keyspace("x");
  EXPECT_THAT(error(request), HasSubstr("keyspace has 1 bytes"));
  request.set_keyspace(std::string(32, 'x'));
  EXPECT_THAT(error(request), HasSubstr("NOT_FOUND"));
  request = Request(0, 2);
  request.mutable_range()->set_layer_end(3);
  EXPECT_THAT(error(request), HasSubstr("range.layer_end"));
  request.mutable_range()->set_layer_end(2);
  EXPECT_THAT(error(request), HasSubstr("range.head_end"));
  request.mutable_range()->set_head_end(0x10001);
  EXPECT_THAT(error(request), HasSubstr("range.head_end"));
  request = Request(0, 2);
  request.set_window_tokens(UINT32_MAX);
  EXPECT_THAT(error(request), HasSubstr("window_tokens"));
  EXPECT_EQ(AllTokens(), 0u);
  EXPECT_EQ(session->engine().pages(), 0u);
}

TEST_F(LeaseCallsTest, InStateBf16EverythingMissesWithQuality) {
  ASSERT_TRUE(keyspaces_->SetState(keyspace_->id, KeyspaceState::kBf16, {"test", "error"}).ok());
  const auto session = OpenSession();
  v1::AcquireResponse response;
  ASSERT_TRUE(Run(session, Request(0, 4), &response).ok());
  EXPECT_EQ(response.hit_pages(), 0u);
  EXPECT_EQ(response.miss_reason(), v1::MISS_REASON_QUALITY);
  EXPECT_EQ(Tokens(TokenTier::kMiss), 4u * kPageTokens);
  v1::LookupRequest lookup;
  lookup.set_keyspace(std::string(keyspace_->id.view()));
  lookup.set_keys(Keys(0, 4));
  v1::LookupResponse looked_up;
  ASSERT_TRUE(LookUp(lookup, &looked_up).ok());
  EXPECT_EQ(looked_up.miss_reason(), v1::MISS_REASON_QUALITY);
  ASSERT_TRUE(keyspaces_->SetState(keyspace_->id, KeyspaceState::kActive, {}).ok());
  ASSERT_TRUE(LookUp(lookup, &looked_up).ok());
  EXPECT_EQ(looked_up.hit_pages(), 4u);
}

TEST_F(LeaseCallsTest, ALeaseThatComesAfterTheSessionEndedIsGivenBack) {
  const auto session = OpenSession();
  store_.HoldAcquires();
  v1::AcquireResponse response;
  Completion completion;
  const v1::AcquireRequest request = Request(0, 4);
  Acquire(context_, session, TimePoint::max(), request, &response, completion.done());
  EXPECT_EQ(completion.times, 0);
  sessions_.End(session);
  store_.RespondHeld();
  EXPECT_EQ(completion.times, 1);
  EXPECT_EQ(completion.status.code(), absl::StatusCode::kUnauthenticated);
  EXPECT_EQ(store_.Stats().leases, 0u);
  EXPECT_EQ(session->engine().pages(), 0u);
  EXPECT_EQ(AllTokens(), 4u * kPageTokens);
}

// Its engine goes on with another session. The session of the request ended when its connection
// closed, because it held nothing: it cannot release a lease any more.
TEST_F(LeaseCallsTest, ALeaseThatComesAfterTheSessionWasDisconnectedIsGivenBack) {
  const auto session = OpenSession();
  const auto other = OpenSession(0, std::string(session->engine().id().view()));
  store_.HoldAcquires();
  v1::AcquireResponse response;
  Completion completion;
  const v1::AcquireRequest request = Request(0, 4);
  Acquire(context_, session, TimePoint::max(), request, &response, completion.done());
  sessions_.Disconnect(session);
  store_.RespondHeld();
  EXPECT_EQ(completion.status.code(), absl::StatusCode::kUnauthenticated);
  EXPECT_EQ(response.lease(), 0u);
  EXPECT_EQ(store_.Stats().leases, 0u);
  EXPECT_EQ(other->engine().pages(), 0u);
}

TEST_F(LeaseCallsTest, ARequestGivenUpGetsNoLeaseBeforeOrAfterItsResponse) {
  const auto session = OpenSession();
  v1::AcquireRequest request = Request(0, 4);
  request.set_request(77);
  v1::AcquireResponse response;
  ASSERT_TRUE(Run(session, request, &response).ok());
  v1::ReleaseRequest give_up;
  give_up.add_requests(77);
  v1::ReleaseResponse released;
  ASSERT_TRUE(Release(context_, *session, give_up, &released).ok());
  EXPECT_EQ(store_.Stats().leases, 0u);
  EXPECT_EQ(session->engine().pages(), 0u);

  store_.HoldAcquires();
  Completion completion;
  request.set_request(78);
  Acquire(context_, session, TimePoint::max(), request, &response, completion.done());
  give_up.set_requests(0, 78);
  ASSERT_TRUE(Release(context_, *session, give_up, &released).ok());
  store_.RespondHeld();
  EXPECT_EQ(completion.status.code(), absl::StatusCode::kCancelled);
  EXPECT_EQ(store_.Stats().leases, 0u);
  EXPECT_EQ(session->engine().pages(), 0u);
  EXPECT_EQ(AllTokens(), 8u * kPageTokens);
}

// A response that is as long as its request allows no amplification.
TEST_F(LeaseCallsTest, APageIsNamedOnceInEveryCall) {
  const auto session = OpenSession();
  const std::string keyspace(keyspace_->id.view());
  const std::string twice = Keys(0, 3) + Keys(1, 1);
  const auto refused = [](const absl::Status& status) {
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr("number 3 repeats"));
  };
  const auto made = [&](auto request) {
    request.set_keyspace(keyspace);
    request.set_keys(twice);
    return request;
  };
  v1::AcquireResponse acquired;
  refused(Run(session, made(v1::AcquireRequest()), &acquired));
  v1::LookupResponse looked_up;
  refused(LookUp(made(v1::LookupRequest()), &looked_up));
  v1::PrefetchResponse prefetched;
  refused(Prefetch(context_, made(v1::PrefetchRequest()), &prefetched));
  v1::UnpinResponse unpinned;
  refused(Unpin(context_, made(v1::UnpinRequest()), &unpinned));
  Completion pinned, deleted;
  v1::PinRequest pin = made(v1::PinRequest());
  pin.set_ttl_ms(1000);
  v1::PinResponse pin_response;
  Pin(context_, TimePoint::max(), pin, &pin_response, pinned.done());
  refused(pinned.status);
  v1::DeleteResponse delete_response;
  Delete(context_, made(v1::DeleteRequest()), &delete_response, deleted.done());
  refused(deleted.status);
  absl::Status got;
  GetReader::Open(context_, made(v1::GetRequest()), TimePoint::max(),
                  [&](const auto& reader) { got = reader.status(); });
  refused(got);
  EXPECT_EQ(store_.Stats().leases, 0u);
}

class PrefetchTest : public CallFixture {
 protected:
  static Limits Few() {
    Limits limits;
    limits.prefetches_max = 3;
    return limits;
  }
  PrefetchTest() : CallFixture(Few()) {
    for (int i = 0; i < 8; ++i) Store(Key(i));
    store_.ReportTier(Tier::kSsd);
  }
};

TEST_F(PrefetchTest, NoMoreAreUnderWayThanMayBe) {
  store_.HoldAcquires();
  v1::PrefetchRequest request;
  request.set_keyspace(std::string(keyspace_->id.view()));
  request.set_keys(Keys(0, 8));
  v1::PrefetchResponse response;
  for (int i = 0; i < 3; ++i) {
    ASSERT_TRUE(Prefetch(context_, request, &response).ok());
    EXPECT_EQ(response.queued_pages(), 8u);
  }
  const absl::Status refused = Prefetch(context_, request, &response);
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(refused.message()), HasSubstr("limits.prefetches_max"));
  EXPECT_EQ(metrics_.rejected[static_cast<size_t>(Rejection::kPrefetches)].value(), 1u);
  EXPECT_EQ(prefetches_.under_way(), 3u);
  store_.RespondHeld();
  EXPECT_EQ(prefetches_.under_way(), 0u);
  EXPECT_TRUE(Prefetch(context_, request, &response).ok());
  EXPECT_EQ(store_.Stats().leases, 0u);
}

TEST(PrefetchBudgetTest, ATenantTakesItsPartOnly) {
  PrefetchBudget budget({.all_max = 5, .tenant_max = 2});
  std::vector<std::unique_ptr<PrefetchBudget::Place>> places;
  for (int i = 0; i < 2; ++i) {
    places.push_back(budget.Take("a"));
    EXPECT_NE(places.back(), nullptr);
  }
  EXPECT_EQ(budget.Take("a"), nullptr);
  places.push_back(budget.Take("b"));
  EXPECT_NE(places.back(), nullptr);
  for (int i = 0; i < 2; ++i) {
    places.push_back(budget.Take(""));
    EXPECT_NE(places.back(), nullptr);
  }
  EXPECT_EQ(budget.Take("b"), nullptr);
  places.erase(places.begin());
  EXPECT_NE(budget.Take("a"), nullptr);
}

TEST_F(LeaseCallsTest, LookupLeasesNothing) {
  v1::LookupRequest request;
  request.set_keyspace(std::string(keyspace_->id.view()));
  request.set_keys(Keys(6, 4));
  v1::LookupResponse response;
  ASSERT_TRUE(LookUp(request, &response).ok());
  EXPECT_EQ(response.hit_pages(), 2u);
  EXPECT_EQ(response.miss_reason(), v1::MISS_REASON_ABSENT);
  EXPECT_EQ(store_.Stats().leases, 0u);
  EXPECT_EQ(AllTokens(), 0u);
}

}  // namespace
}  // namespace crumb::server
