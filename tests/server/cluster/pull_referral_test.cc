// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
// RemoteReader over homes that refer to other nodes: which node is queried next, how often, and
// which reports homes receive.
#include <gmock/gmock.h>

#include "tests/common/eventually.h"
#include "tests/server/cluster/pull_fixture.h"

namespace crumb::server {
namespace {

// One home of the first run, and the two other nodes.
class ReferralTest : public PullTest {
 protected:
  ReferralTest() {
    const std::string home = peers_.HomesToQuery(Key(0)).at(0)->id();
    for (const auto& fake : fakes_) {
      (fake->id() == home ? homes_ : others_).push_back(fake);
    }
    homes_[0]->ReferTo({others_[0]->id(), others_[1]->id()});
    homes_[0]->absent = true;
  }
  ~ReferralTest() override { steps_.Stop(); }

  // Makes this node the only home of everything; the fakes are its peers.
  void BecomeHome() {
    PlacementNode self;
    self.id = "self";
    self.host = self.id;
    peers_.history().Install(2, {self});
    self.weight = 2;  // so that the view before, with the fakes, is forgotten
    peers_.history().Install(3, {self});
  }
  void Note(const std::string& node, int count) {
    HolderDirectory::Offer offer;
    offer.node = node;
    offer.keyspace = keyspace_->id;
    offer.generation = 1;
    offer.range = kGeometry.all_tiles();
    for (int i = 0; i < count; ++i) offer.keys.push_back(Key(i));
    offer.tile_bytes.assign(offer.keys.size(), kGeometry.int2_tile_bytes());
    holders_.Note(offer);
  }
  PullResult PullWithDirectory(PullRequest request) {
    std::promise<PullResult> completed;
    directory_reader_.Pull(std::move(request),
                           [&](PullResult result) { completed.set_value(result); });
    return completed.get_future().get();
  }

  std::vector<std::shared_ptr<FakePeer>> homes_, others_;
  Mutex mutex_;
  std::vector<std::pair<PageKey, PageKey>> pulled_ ABSL_GUARDED_BY(mutex_);  // page, run
  RemoteReader directory_reader_{{store_, peers_, flights_, timer_, steps_, Clock::Real(), counts_,
                                  1024, [](const std::string&) {}, &holders_,
                                  [this](const FragmentHeader& header, const PageKey& run) {
                                    MutexLock lock(&mutex_);
                                    pulled_.emplace_back(header.key, run);
                                  }},
                                 4};
};

TEST_F(ReferralTest, PagesComeFromTheNodeThatTheHomeRefersTo) {
  EXPECT_EQ(Pull(Request(0, 20)).pages, 20u);
  EXPECT_EQ(homes_[0]->queries.load(), 1);
  EXPECT_EQ(homes_[0]->pages_fetched.load(), 0);
  EXPECT_EQ(others_[0]->queries.load(), 1);
  EXPECT_EQ(others_[0]->pages_fetched.load(), 20);
  EXPECT_EQ(others_[1]->queries.load(), 0);
  EXPECT_EQ(counts_.referred_runs.value(), 1u);
  EXPECT_TRUE(homes_[0]->shortfalls().empty());
}

TEST_F(ReferralTest, TheNextHolderIsQueriedAndTheHomeLearnsOfTheFirst) {
  others_[0]->hits_max = 3;
  EXPECT_EQ(Pull(Request(0, 20)).pages, 20u);
  EXPECT_EQ(others_[1]->pages_fetched.load(), 20);
  EXPECT_TRUE(Eventually([&] { return homes_[0]->shortfalls().size() == 1; }));
  EXPECT_EQ(homes_[0]->queries.load(), 2);
  EXPECT_THAT(homes_[0]->shortfalls(), testing::ElementsAre(others_[0]->id() + " has 3"));
}

TEST_F(ReferralTest, TheHomeIsTheLastResortAndTheNumberOfQueriesIsBounded) {
  for (const auto& other : others_) other->absent = true;
  homes_[0]->absent = false;
  EXPECT_EQ(Pull(Request(0, 20)).pages, 20u);
  EXPECT_EQ(homes_[0]->pages_fetched.load(), 20);
  EXPECT_THAT(homes_[0]->shortfalls(),
              testing::ElementsAre(others_[0]->id() + " has 0", others_[1]->id() + " has 0"));
  EXPECT_EQ(homes_[0]->queries.load(), 2);
  // Also if no node has anything, and holders refer on.
  for (const auto& fake : fakes_) {
    fake->absent = true;
    fake->ReferTo({fakes_[0]->id(), fakes_[1]->id(), fakes_[2]->id()});
  }
  const int before = Sum(&FakePeer::queries);
  EXPECT_EQ(Pull(Request(320, 8)).pages, 0u);
  EXPECT_LE(Sum(&FakePeer::queries) - before, 4);
}

TEST_F(ReferralTest, TheBestOfShortResponsesIsTaken) {
  others_[0]->hits_max = 3;
  others_[1]->hits_max = 7;
  const PullResult result = Pull(Request(0, 20));
  EXPECT_EQ(result.pages, 7u);
  EXPECT_EQ(result.miss_reason, MissReason::kAbsent);
  EXPECT_EQ(others_[1]->pages_fetched.load(), 7);
  EXPECT_EQ(others_[0]->pages_fetched.load(), 0);
}

TEST_F(ReferralTest, SilentAndUnknownHoldersAreSkipped) {
  homes_[0]->ReferTo({"a stranger", others_[0]->id(), others_[1]->id()});
  others_[0]->breaker().Fail(Breaker::Of::kCalls);
  others_[0]->breaker().Fail(Breaker::Of::kCalls);
  EXPECT_EQ(Pull(Request(0, 20)).pages, 20u);
  EXPECT_EQ(others_[0]->queries.load(), 0);
  EXPECT_EQ(others_[1]->pages_fetched.load(), 20);
  EXPECT_TRUE(homes_[0]->shortfalls().empty());
}

TEST_F(ReferralTest, AHolderThatIsSilentEndsAtTheDeadline) {
  others_[0]->silent = true;
  const PullResult result = Pull(Request(0, 20, std::chrono::milliseconds(50)));
  EXPECT_EQ(result.pages, 0u);
  EXPECT_EQ(result.miss_reason, MissReason::kDeadline);
  others_[0]->RespondLate();
  // The request is over: no other node is queried.
  steps_.Stop();
  EXPECT_EQ(others_[1]->queries.load(), 0);
}

TEST_F(ReferralTest, ReferralsThatMakeNoSenseAreNone) {
  homes_[0]->refers_pages = 0;
  EXPECT_EQ(Pull(Request(0, 20)).pages, 0u);
  EXPECT_EQ(others_[0]->queries.load() + others_[1]->queries.load(), 0);
}

TEST_F(ReferralTest, EveryNodeIsQueriedWithoutReferrals) {
  PullRequest request = Request(0, 8);
  request.everyone = true;
  EXPECT_EQ(Pull(request).pages, 8u);
  EXPECT_EQ(Sum(&FakePeer::queries), kPeers);
  EXPECT_EQ(counts_.referred_runs.value(), 0u);
}

TEST_F(ReferralTest, FindReportsTheHolder) {
  const FoundPages found = Find(Request(0, 20));
  EXPECT_EQ(found.tiers.size(), 20u);
  EXPECT_THAT(found.nodes, testing::ElementsAre(others_[0]->id()));
  EXPECT_EQ(Sum(&FakePeer::fetches), 0);
  others_[0]->absent = true;
  EXPECT_THAT(Find(Request(0, 20)).nodes, testing::ElementsAre(others_[1]->id()));
  EXPECT_THAT(homes_[0]->shortfalls(), testing::ElementsAre(others_[0]->id() + " has 0"));
  others_[1]->absent = true;
  EXPECT_EQ(Find(Request(0, 20)).tiers.size(), 0u);
}

TEST_F(ReferralTest, AHomeFollowsItsOwnDirectory) {
  BecomeHome();
  Note(others_[0]->id(), 20);
  Note(others_[1]->id(), 10);
  EXPECT_EQ(PullWithDirectory(Request(0, 20)).pages, 20u);
  EXPECT_EQ(others_[0]->pages_fetched.load(), 20);
  EXPECT_EQ(Sum(&FakePeer::queries), 1);
  // A holder that lacks them is forgotten.
  others_[0]->absent = true;
  Note(others_[0]->id(), 40);
  PullRequest rest = Request(0, 40);
  EXPECT_EQ(PullWithDirectory(rest).pages, 20u);
  HolderDirectory::Query query;
  query.requester = "reader";
  query.keyspace = keyspace_->id;
  query.generation = 1;
  query.range = kGeometry.all_tiles();
  const std::vector<PageKey> keys = {Key(25)};
  query.keys = keys;
  EXPECT_TRUE(Eventually([&] { return !holders_.Refer(query).has_value(); }));
}

TEST_F(ReferralTest, HomesLearnOfPagesThatWerePulled) {
  EXPECT_EQ(PullWithDirectory(Request(0, 40)).pages, 40u);
  steps_.Stop();
  MutexLock lock(&mutex_);
  ASSERT_EQ(pulled_.size(), 40u);
  for (const auto& [page, run] : pulled_) {
    bool in_second = false;
    for (int i = 32; i < 40; ++i) in_second |= page == Key(i);
    EXPECT_EQ(run, in_second ? Key(32) : Key(0));
  }
}

}  // namespace
}  // namespace crumb::server
