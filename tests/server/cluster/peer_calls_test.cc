// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
// Limits of the resources that one node takes of another: requests at and beyond them, below gRPC.
#include "server/cluster/peer_calls.h"

#include <gmock/gmock.h>

#include "server/cluster/page_source.h"
#include "tests/server/call_fixture.h"
#include "tests/server/cluster/quiet_peer.h"

namespace crumb::server {
namespace {

using testing::Each;

constexpr size_t kKeysMax = 4096;

// Counts the keys that Acquires name.
class CountingStore final : public MemoryStore {
 public:
  CountingStore() : MemoryStore(16, 1 << 16, {}) {}
  void Acquire(storage::AcquireRequest request,
               std::function<void(absl::StatusOr<storage::AcquireResult>)> done) override {
    keys += request.keys.size();
    MemoryStore::Acquire(std::move(request), std::move(done));
  }
  uint64_t keys = 0;
};

class PeerCallsTest : public CallFixture {
 protected:
  PeerCallsTest() {
    peers_.SetPeers({peer_, std::make_shared<QuietPeer>("other")});
    for (int i = 0; i < 4; ++i) Store(Key(i));
  }

  v1::PeerCaller Caller(const std::string& node) {
    v1::PeerCaller caller;
    caller.set_node(node);
    caller.set_wire_version(kWireMax);
    return caller;
  }
  v1::PeerAcquireRequest Request(const std::string& node, const std::vector<std::string>& runs) {
    v1::PeerAcquireRequest request;
    *request.mutable_caller() = Caller(node);
    request.set_keyspace(std::string(keyspace_->id.view()));
    request.set_generation(1);
    request.mutable_range()->set_layer_end(kGeometry.layers);
    request.mutable_range()->set_head_end(kGeometry.kv_heads);
    for (const std::string& run : runs) request.add_runs(run);
    request.set_lease(true);
    return request;
  }
  absl::Status Acquire(const v1::PeerAcquireRequest& request, v1::PeerAcquireResponse* response) {
    Completion completion;
    response->Clear();
    PeerAcquire(calls_, request, TimePoint::max(), response, completion.done());
    EXPECT_EQ(completion.times, 1);
    return completion.status;
  }
  void Push(const std::string& node, int first, int count,
            const std::shared_ptr<Completion>& completion) {
    auto request = std::make_shared<v1::PeerPushRequest>();
    auto response = std::make_shared<v1::PeerPushResponse>();
    *request->mutable_caller() = Caller(node);
    request->mutable_keyspace()->set_keyspace(std::string(keyspace_->id.view()));
    request->set_keys(Keys(first, count));
    request->mutable_range()->set_layer_end(kGeometry.layers);
    request->mutable_range()->set_head_end(kGeometry.kv_heads);
    for (int i = 0; i < count; ++i) request->add_tile_bytes(kGeometry.int2_tile_bytes());
    request->set_session(std::string(16, 's'));
    PeerPush(calls_, *request, Clock::Real().Now() + std::chrono::seconds(60), response.get(),
             [request, response, completion](absl::Status status) {
               ++completion->times;
               completion->status = std::move(status);
             });
  }
  transport::SourceRequest Read(const transport::SessionToken& session, int first, int count) {
    transport::SourceRequest request;
    request.session = session;
    request.keyspace = keyspace_->id;
    request.generation = 1;
    request.deadline = TimePoint::max();
    for (int i = first; i < first + count; ++i) {
      request.pages.push_back({Key(i), kGeometry.all_tiles()});
    }
    return request;
  }
  static std::vector<transport::PageStatus> StatusesOf(const transport::SourceResponse& reply) {
    std::vector<transport::PageStatus> statuses;
    for (const auto& page : reply.pages) statuses.push_back(page.status);
    return statuses;
  }

  const std::shared_ptr<QuietPeer> peer_ = std::make_shared<QuietPeer>("peer");
  Executor steps_{{"test-steps", 1, 64}};
  storage::DeadlineTimer timer_{Clock::Real()};
  PeerTable peers_{"self", 1};
  PageFlights flights_;
  ClusterMetrics counts_;
  PeerSessions grants_{256};
  PeerLeases leases_{store_,
                     Clock::Real(),
                     {.leases_max = 6, .leases_per_node_max = 3, .pages_per_node_max = 8},
                     std::chrono::hours(1)};
  RemoteReader reader_{
      {store_, peers_, flights_, timer_, steps_, Clock::Real(), counts_, 1024, [](const auto&) {}},
      4};
  PartyBudget push_pages_{4};
  HolderDirectory holders_{1 << 16};
  // Returns the calls of a node with another policy for offers.
  PeerCallContext With(PushPolicy policy) const {
    return {calls_.clock,     calls_.store,
            calls_.keyspaces, calls_.peers,
            calls_.sessions,  calls_.leases,
            calls_.reader,    calls_.push_pages,
            calls_.holders,   calls_.metrics,
            policy,           calls_.push_deadline,
            calls_.keys_max,  calls_.record_page_bytes,
            calls_.self,      calls_.merge,
            calls_.drain};
  }
  // An offer of pages of the current generation, of some heads.
  v1::PeerPushRequest Offer(const std::string& node, int first, int count, uint32_t head_begin = 0,
                            uint32_t head_end = kGeometry.kv_heads) {
    v1::PeerPushRequest request;
    *request.mutable_caller() = Caller(node);
    request.mutable_keyspace()->set_keyspace(std::string(keyspace_->id.view()));
    request.mutable_keyspace()->mutable_record()->set_generation(keyspace_->generation.load());
    request.set_keys(Keys(first, count));
    request.mutable_range()->set_layer_end(kGeometry.layers);
    request.mutable_range()->set_head_begin(head_begin);
    request.mutable_range()->set_head_end(head_end);
    for (int i = 0; i < count; ++i) request.add_tile_bytes(kGeometry.int2_tile_bytes());
    request.set_session(std::string(16, 's'));
    return request;
  }
  // Makes an offer and expects the response at once.
  v1::PeerPushResponse Push(const PeerCallContext& context, const v1::PeerPushRequest& request) {
    v1::PeerPushResponse response;
    Completion completion;
    PeerPush(context, request, Clock::Real().Now() + std::chrono::seconds(60), &response,
             completion.done());
    EXPECT_EQ(completion.times, 1);
    EXPECT_TRUE(completion.status.ok()) << completion.status.ToString();
    return response;
  }
  std::shared_ptr<QuietPeer> Other() {
    return std::static_pointer_cast<QuietPeer>(peers_.Find("other"));
  }

  const PeerCallContext calls_{Clock::Real(),
                               store_,
                               *keyspaces_,
                               peers_,
                               grants_,
                               leases_,
                               reader_,
                               push_pages_,
                               holders_,
                               counts_,
                               PushPolicy::kAlways,
                               std::chrono::seconds(60),
                               kKeysMax,
                               1 << 20,
                               [] {
                                 v1::NodeRecord self;
                                 self.set_id("self");
                                 self.set_wire_max(kWireMax);
                                 return self;
                               },
                               {},
                               {}};
};

TEST_F(PeerCallsTest, APageThatIsNamedTwiceIsRefused) {
  v1::PeerAcquireResponse response;
  EXPECT_TRUE(Acquire(Request("peer", {Keys(0, 2), Keys(2, 1)}), &response).ok());
  for (const auto& runs : {std::vector{Keys(0, 1) + Keys(0, 1)}, {Keys(0, 2), Keys(1, 1)}}) {
    EXPECT_TRUE(absl::IsInvalidArgument(Acquire(Request("peer", runs), &response)));
    EXPECT_EQ(response.hit_pages_size(), 0);
  }
}

TEST_F(PeerCallsTest, ResponsesAreNoLongerThanTheKeysThatWereRequested) {
  v1::PeerAcquireRequest request = Request("peer", std::vector<std::string>(kKeysMax + 1, ""));
  request.set_generation(0);  // a miss, which needs no key
  v1::PeerAcquireResponse response;
  EXPECT_TRUE(absl::IsInvalidArgument(Acquire(request, &response)));
  EXPECT_EQ(response.ByteSizeLong(), 0u);
}

TEST_F(PeerCallsTest, OneNodeCannotTakeAllLeasesOfPeers) {
  v1::PeerAcquireResponse response;
  std::vector<uint64_t> leases;
  for (int i = 0; i < 8; ++i) {
    ASSERT_TRUE(Acquire(Request("peer", {Keys(0, 1)}), &response).ok());
    EXPECT_EQ(response.hit_pages(0), 1u);  // the same as without a lease
    if (response.lease() != 0) leases.push_back(response.lease());
  }
  EXPECT_EQ(leases.size(), 3u);
  EXPECT_EQ(counts_.peer_leases_refused.value(), 5u);
  ASSERT_TRUE(Acquire(Request("other", {Keys(0, 1)}), &response).ok());
  EXPECT_NE(response.lease(), 0u);
  // Nor all pages: 8 of one node, whatever the number of its leases.
  v1::PeerReleaseRequest release;
  *release.mutable_caller() = Caller("peer");
  for (const uint64_t lease : leases) release.add_leases(lease);
  EXPECT_TRUE(PeerRelease(calls_, release).ok());
  std::vector<bool> granted;
  for (int i = 0; i < 3; ++i) {
    ASSERT_TRUE(Acquire(Request("peer", {Keys(0, 4)}), &response).ok());
    granted.push_back(response.lease() != 0);
  }
  EXPECT_EQ(granted, (std::vector<bool>{true, true, false}));
}

TEST_F(PeerCallsTest, NodesWithInventedNamesHaveOneBudgetTogether) {
  v1::PeerAcquireResponse response;
  int leases = 0;
  std::string first_session;
  for (int i = 0; i < 300; ++i) {
    const std::string name = "invented " + std::to_string(i);
    ASSERT_TRUE(Acquire(Request(name, {Keys(0, 1)}), &response).ok());
    leases += response.lease() != 0;
    if (i == 0) first_session = response.session();
  }
  EXPECT_EQ(leases, 3);
  // And they do not take the sessions of nodes of the view: 256 are all that there are.
  ASSERT_TRUE(Acquire(Request("peer", {Keys(0, 1)}), &response).ok());
  EXPECT_EQ(response.session().size(), 16u);
  transport::SessionToken token;
  std::memcpy(token.data(), first_session.data(), token.size());
  EXPECT_EQ(grants_.ReaderOf(token, keyspace_->id), std::nullopt);
}

TEST(PeerSessionsTest, StrangersTakeNoSessionOfAMember) {
  using Who = PeerSessions::Who;
  PeerSessions sessions(2);
  const KeyspaceId keyspace{};
  for (size_t i = 0; i <= PeerSessions::kStrangersMax; ++i) {
    ASSERT_TRUE(sessions.Grant("stranger " + std::to_string(i), keyspace, Who::kStranger).ok());
  }
  EXPECT_TRUE(sessions.Grant("a", keyspace, Who::kMember).ok());
  EXPECT_TRUE(sessions.Grant("stranger 9", keyspace, Who::kMember).ok());
  EXPECT_TRUE(sessions.Grant("a", keyspace, Who::kMember).ok());
  EXPECT_TRUE(absl::IsResourceExhausted(sessions.Grant("b", keyspace).status()));
  EXPECT_TRUE(absl::IsResourceExhausted(sessions.Grant("stranger 10", keyspace).status()));
  sessions.Forget("a");
  EXPECT_TRUE(sessions.Grant("stranger 10", keyspace).ok());
}

TEST_F(PeerCallsTest, ReleasesAreBounded) {
  v1::PeerReleaseRequest release;
  *release.mutable_caller() = Caller("peer");
  for (int i = 0; i < kReleasesMax; ++i) release.add_leases(1000 + static_cast<uint64_t>(i));
  EXPECT_TRUE(PeerRelease(calls_, release).ok());
  release.add_leases(1);
  EXPECT_TRUE(absl::IsInvalidArgument(PeerRelease(calls_, release)));
  release.clear_caller();
  EXPECT_FALSE(PeerRelease(calls_, release).ok());
}

TEST_F(PeerCallsTest, OffersThatNeverArriveHoldNoMoreThanTheirNodesPages) {
  auto first = std::make_shared<Completion>();
  Push("peer", 10, 3, first);  // 3 of 4 pages
  EXPECT_EQ(first->times, 0);
  EXPECT_EQ(push_pages_.held("peer"), 3u);
  auto refused = std::make_shared<Completion>();
  Push("peer", 20, 2, refused);
  EXPECT_TRUE(absl::IsResourceExhausted(refused->status));
  EXPECT_EQ(counts_.peer_pushes_refused.value(), 1u);
  // Another node's offers are not held up by it.
  auto other = std::make_shared<Completion>();
  Push("other", 20, 4, other);
  EXPECT_EQ(other->times, 0);
  EXPECT_EQ(push_pages_.held("other"), 4u);
  peer_->CompleteFetches();
  std::static_pointer_cast<QuietPeer>(peers_.Find("other"))->CompleteFetches();
  steps_.Stop();
  EXPECT_TRUE(first->status.ok());
  EXPECT_EQ(push_pages_.held("peer"), 0u);
}

TEST_F(PeerCallsTest, APageThatIsOfferedTwiceIsFetchedOnce) {
  v1::PeerPushRequest request;
  v1::PeerPushResponse response;
  *request.mutable_caller() = Caller("peer");
  request.mutable_keyspace()->set_keyspace(std::string(keyspace_->id.view()));
  request.set_keys(Keys(10, 1) + Keys(10, 1) + Keys(11, 1));
  request.mutable_range()->set_layer_end(kGeometry.layers);
  request.mutable_range()->set_head_end(kGeometry.kv_heads);
  for (int i = 0; i < 3; ++i) request.add_tile_bytes(kGeometry.int2_tile_bytes());
  request.set_session(std::string(16, 's'));
  Completion completion;
  PeerPush(calls_, request, Clock::Real().Now() + std::chrono::seconds(60), &response,
           completion.done());
  ASSERT_EQ(peer_->fetches.size(), 1u);
  EXPECT_EQ(peer_->fetches[0].first.pages.size(), 2u);
  peer_->CompleteFetches();
  steps_.Stop();
  EXPECT_EQ(response.deduplicated(), 1u);
  EXPECT_EQ(response.failed(), 2u);
}

TEST_F(PeerCallsTest, OneNodesReadsAreBoundedUntilTheirResponsesAreGone) {
  PageSource source(store_, *keyspaces_, grants_, counts_, 2);
  const auto session = grants_.Grant("peer", keyspace_->id).value();
  const auto other = grants_.Grant("other", keyspace_->id).value();
  std::vector<transport::SourceResponse> replies;
  const auto keep = [&](transport::SourceResponse reply) { replies.push_back(std::move(reply)); };
  for (int i = 0; i < 3; ++i) source.Acquire(Read(session, 0, 2), keep);
  source.Acquire(Read(other, 0, 2), keep);
  EXPECT_THAT(StatusesOf(replies[0]), Each(transport::PageStatus::kHit));
  EXPECT_THAT(StatusesOf(replies[1]), Each(transport::PageStatus::kHit));
  EXPECT_THAT(StatusesOf(replies[2]), Each(transport::PageStatus::kBusy));
  EXPECT_THAT(StatusesOf(replies[3]), Each(transport::PageStatus::kHit));
  EXPECT_EQ(counts_.peer_reads_refused.value(), 1u);
  replies.clear();
  EXPECT_EQ(store_.Stats().leases, 0u);
  source.Acquire(Read(session, 0, 2), keep);
  EXPECT_THAT(StatusesOf(replies[0]), Each(transport::PageStatus::kHit));
}

TEST_F(PeerCallsTest, ReadsThatNameAPageTwiceAreRefused) {
  PageSource source(store_, *keyspaces_, grants_, counts_, 2);
  const auto session = grants_.Grant("peer", keyspace_->id).value();
  transport::SourceRequest twice = Read(session, 0, 2);
  twice.pages.push_back(twice.pages[0]);
  source.Acquire(std::move(twice), [](transport::SourceResponse reply) {
    EXPECT_THAT(StatusesOf(reply), Each(transport::PageStatus::kRefused));
  });
}

TEST_F(PeerCallsTest, ReadsOfAbsentPagesCostTheirKeysNotTheirSquare) {
  CountingStore store;
  PageSource source(store, *keyspaces_, grants_, counts_, 2);
  const auto session = grants_.Grant("peer", keyspace_->id).value();
  constexpr int kPages = 4096;
  bool completed = false;
  source.Acquire(Read(session, 100, kPages), [&](transport::SourceResponse reply) {
    completed = true;
    EXPECT_THAT(StatusesOf(reply), Each(transport::PageStatus::kAbsent));
  });
  EXPECT_TRUE(completed);
  EXPECT_LE(store.keys, 4u * kPages);
}

TEST_F(PeerCallsTest, WithheldPagesAreNotServedToOtherNodes) {
  PageSource source(store_, *keyspaces_, grants_, counts_, 2);
  v1::PeerAcquireResponse response;
  ASSERT_TRUE(Acquire(Request("peer", {Keys(0, 2)}), &response).ok());
  EXPECT_EQ(response.hit_pages(0), 2u);
  const auto session = grants_.Grant("peer", keyspace_->id).value();
  keyspaces_->Withhold(Withholding::kEverything);
  ASSERT_TRUE(Acquire(Request("peer", {Keys(0, 2)}), &response).ok());
  EXPECT_EQ(response.hit_pages(0), 0u);
  EXPECT_EQ(response.miss_reason(), v1::MISS_REASON_GENERATION);
  source.Acquire(Read(session, 0, 2), [](transport::SourceResponse reply) {
    EXPECT_THAT(StatusesOf(reply), Each(transport::PageStatus::kStale));
  });
}

TEST_F(PeerCallsTest, OneTenantCannotTakeAllPulls) {
  RemoteReader reader(
      {store_, peers_, flights_, timer_, steps_, Clock::Real(), counts_, 1024, [](const auto&) {}},
      4, 2);
  const auto pull = [&](const std::string& tenant, int page) {
    auto keyspace = std::make_shared<Keyspace>();
    keyspace->id = keyspace_->id;
    keyspace->geometry = keyspace_->geometry;
    keyspace->tenant = tenant;
    PullRequest request;
    request.keyspace = keyspace;
    request.keys = {Key(page)};
    request.range = kGeometry.all_tiles();
    request.everyone = true;
    request.deadline = Clock::Real().Now() + std::chrono::hours(1);
    auto reason = std::make_shared<std::optional<MissReason>>();
    reader.Pull(std::move(request), [reason](PullResult result) { *reason = result.miss_reason; });
    return *reason;  // none while it waits for nodes that do not respond
  };
  EXPECT_EQ(pull("a", 50), std::nullopt);
  EXPECT_EQ(pull("a", 51), std::nullopt);
  EXPECT_EQ(pull("a", 52), MissReason::kBusy);
  EXPECT_EQ(pull("b", 53), std::nullopt);
  EXPECT_EQ(counts_.pulls_refused.value(), 1u);
}

TEST_F(PeerCallsTest, OfferedPagesAreNotedAndReadersReferredToTheirHolder) {
  const PeerCallContext reused = With(PushPolicy::kReused);
  const v1::PeerPushResponse noted = Push(reused, Offer("peer", 10, 3));
  EXPECT_EQ(noted.noted(), 3u);
  EXPECT_EQ(noted.stored() + noted.failed() + noted.deduplicated(), 0u);
  EXPECT_TRUE(peer_->fetches.empty());
  EXPECT_EQ(counts_.noted_pages.value(), 3u);
  v1::PeerAcquireRequest request = Request("other", {Keys(0, 2), Keys(10, 5)});
  v1::PeerAcquireResponse response;
  ASSERT_TRUE(Acquire(request, &response).ok());
  EXPECT_EQ(response.referrals_size(), 0);  // to a release that does not know referrals
  request.set_refer(true);
  ASSERT_TRUE(Acquire(request, &response).ok());
  EXPECT_THAT(response.hit_pages(), testing::ElementsAre(2u, 0u));
  ASSERT_EQ(response.referrals_size(), 1);
  EXPECT_EQ(response.referrals(0).run(), 1u);
  EXPECT_EQ(response.referrals(0).pages(), 3u);
  EXPECT_THAT(response.referrals(0).nodes(), testing::ElementsAre("peer"));
  EXPECT_EQ(counts_.referrals_given.value(), 1u);
  // Not to itself, and not a node that is not in the view.
  for (const char* requester : {"peer", "stranger"}) {
    request = Request(requester, {Keys(10, 5)});
    request.set_refer(true);
    ASSERT_TRUE(Acquire(request, &response).ok());
    EXPECT_EQ(response.referrals_size(), 0) << requester;
  }
}

TEST_F(PeerCallsTest, AHotPageIsReferredAwayAlthoughItIsHere) {
  Push(calls_, Offer("peer", 0, 4));
  v1::PeerAcquireRequest request = Request("other", {Keys(0, 4)});
  request.set_refer(true);
  int here = 0, referred = 0;
  for (int i = 0; i < 20; ++i) {
    v1::PeerAcquireResponse response;
    ASSERT_TRUE(Acquire(request, &response).ok());
    here += response.hit_pages(0) == 4;
    referred += response.referrals_size();
    v1::PeerReleaseRequest release;
    *release.mutable_caller() = Caller("other");
    release.add_leases(response.lease());
    ASSERT_TRUE(PeerRelease(calls_, release).ok());
  }
  EXPECT_EQ(here, 10);
  EXPECT_EQ(referred, 10);
  // A caller that only wants to know where pages are is not counted.
  request.set_lease(false);
  v1::PeerAcquireResponse first, second;
  ASSERT_TRUE(Acquire(request, &first).ok());
  ASSERT_TRUE(Acquire(request, &second).ok());
  EXPECT_EQ(first.referrals_size(), second.referrals_size());
}

TEST_F(PeerCallsTest, WhatAHolderWasFoundToLackIsReferredToNoMore) {
  Push(With(PushPolicy::kReused), Offer("peer", 10, 5));
  v1::PeerAcquireRequest request = Request("other", {Keys(10, 5)});
  request.set_refer(true);
  v1::PeerShortfall* const shortfall = request.add_not_at();
  shortfall->set_node("peer");
  shortfall->set_pages(2);
  v1::PeerAcquireResponse response;
  ASSERT_TRUE(Acquire(request, &response).ok());
  ASSERT_EQ(response.referrals_size(), 1);
  EXPECT_EQ(response.referrals(0).pages(), 2u);
  EXPECT_EQ(counts_.holders_forgotten.value(), 1u);
  // Runs that the request does not have, and more nodes than a referral names.
  shortfall->set_run(1);
  EXPECT_TRUE(absl::IsInvalidArgument(Acquire(request, &response)));
  shortfall->set_run(0);
  for (size_t i = 0; i < HolderDirectory::kReferralNodesMax; ++i) {
    request.add_not_at()->set_node("peer");
  }
  EXPECT_TRUE(absl::IsInvalidArgument(Acquire(request, &response)));
}

TEST_F(PeerCallsTest, PagesOfANodeThatLeavesAreFetchedWhateverThePolicy) {
  v1::PeerPushRequest offer = Offer("peer", 10, 2);
  offer.set_note_only(true);
  EXPECT_EQ(Push(calls_, offer).noted(), 2u);
  offer.set_leaving(true);
  v1::PeerPushResponse response;
  Completion completion;
  PeerPush(With(PushPolicy::kReused), offer, Clock::Real().Now() + std::chrono::seconds(60),
           &response, completion.done());
  ASSERT_EQ(peer_->fetches.size(), 1u);
  EXPECT_EQ(peer_->fetches[0].first.pages.size(), 2u);
  peer_->CompleteFetches();
  steps_.Stop();
  EXPECT_EQ(response.failed(), 2u);
}

TEST_F(PeerCallsTest, PartsOfAPageOnTwoNodesComeTogetherAtTheirHome) {
  const PeerCallContext reused = With(PushPolicy::kReused);
  const v1::PeerPushRequest first = Offer("peer", 10, 2, 0, 1);
  EXPECT_EQ(Push(reused, first).noted(), 2u);
  v1::PeerPushRequest second = Offer("other", 10, 2, 1, 2);
  second.set_session(std::string(16, 't'));
  v1::PeerPushResponse response;
  Completion completion;
  PeerPush(reused, second, Clock::Real().Now() + std::chrono::seconds(60), &response,
           completion.done());
  ASSERT_EQ(peer_->fetches.size(), 1u);
  ASSERT_EQ(Other()->fetches.size(), 1u);
  const transport::FetchRequest& from_peer = peer_->fetches[0].first;
  EXPECT_EQ(from_peer.pages.size(), 2u);
  EXPECT_EQ(from_peer.pages[0].range.heads, (IndexRange{0, 1}));
  EXPECT_EQ(from_peer.session[0], 's');
  EXPECT_EQ(Other()->fetches[0].first.pages[0].range.heads, (IndexRange{1, 2}));
  EXPECT_EQ(Other()->fetches[0].first.session[0], 't');
  EXPECT_EQ(push_pages_.held("other"), 4u);
  peer_->CompleteFetches();
  Other()->CompleteFetches();
  steps_.Stop();
  EXPECT_EQ(push_pages_.held("other"), 0u);
}

TEST_F(PeerCallsTest, OffersOfAnOlderGenerationAreNotReferredTo) {
  v1::PeerPushRequest offer = Offer("peer", 10, 2);
  offer.mutable_keyspace()->mutable_record()->set_generation(0);
  Push(With(PushPolicy::kReused), offer);
  EXPECT_EQ(holders_.pages(), 0u);
}

}  // namespace
}  // namespace crumb::server
