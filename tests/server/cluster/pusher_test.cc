// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
// Pusher over homes with scripted responses: no page ends uncounted, and every count has its
// reason.
#include "server/cluster/pusher.h"

#include <gmock/gmock.h>

#include <random>
#include <set>
#include <thread>

#include "tests/common/eventually.h"
#include "tests/server/call_fixture.h"

namespace crumb::server {
namespace {

using std::chrono::milliseconds;
using PushResult = absl::StatusOr<v1::PeerPushResponse>;
using Behaviour = std::function<PushResult(const v1::PeerPushRequest&)>;

v1::NodeRecord RecordOf(const std::string& id) {
  v1::NodeRecord record;
  record.set_id(id);
  return record;
}

size_t KeysIn(const v1::PeerPushRequest& request) {
  return request.keys().size() / sizeof(PageKey);
}

PushResult StoredAll(const v1::PeerPushRequest& request) {
  v1::PeerPushResponse response;
  response.set_stored(static_cast<uint32_t>(KeysIn(request)));
  return response;
}

// All pages fail for one reason.
PushResult FailedAll(const v1::PeerPushRequest& request, v1::MissReason reason) {
  v1::PeerPushResponse response;
  response.set_failed(static_cast<uint32_t>(KeysIn(request)));
  for (uint32_t i = 0; i < KeysIn(request); ++i) {
    response.add_failed_pages(i);
    response.add_failed_reasons(reason);
  }
  return response;
}

// A home that records the pages that it was offered and has taken.
class Home : public Peer {
 public:
  Home(const std::string& id, const Breaker::Options& breaker)
      : Peer(RecordOf(id), breaker, Clock::Real()) {}

  void Acquire(v1::PeerAcquireRequest, TimePoint,
               Peer::Callback<v1::PeerAcquireResponse> reply) override {
    reply(absl::UnimplementedError("not in this test"));
  }
  void Release(uint64_t) override {}
  void Push(v1::PeerPushRequest request, TimePoint,
            Peer::Callback<v1::PeerPushResponse> reply) override {
    Behaviour behaviour;
    {
      MutexLock lock(&mutex_);
      ++calls_;
      behaviour = behaviour_;
      if (holding_) {
        held_.emplace_back(std::move(request), std::move(reply));
        return;
      }
    }
    const server::PushResult said = behaviour(request);
    if (said.ok() && said->failed() == 0) Take(request);
    reply(said);
  }
  void Keyspaces(v1::PeerKeyspacesRequest, TimePoint,
                 Peer::Callback<v1::PeerKeyspacesResponse> reply) override {
    reply(absl::UnimplementedError("not in this test"));
  }
  void Drain(TimePoint, Peer::Callback<v1::PeerDrainResponse> reply) override {
    reply(absl::UnimplementedError("not in this test"));
  }
  void Fetch(transport::FetchRequest, transport::FetchDone) override {}
  const char* transport() const override { return "fake"; }

  void Behave(Behaviour behaviour) {
    MutexLock lock(&mutex_);
    behaviour_ = std::move(behaviour);
  }
  void Hold() {
    MutexLock lock(&mutex_);
    holding_ = true;
  }
  void RespondToHeld() {
    std::vector<Offer> ready;
    {
      MutexLock lock(&mutex_);
      holding_ = false;
      ready.swap(held_);
    }
    for (Offer& offer : ready) Push(std::move(offer.first), TimePoint(), std::move(offer.second));
  }
  size_t held() {
    MutexLock lock(&mutex_);
    return held_.size();
  }
  std::set<PageKey> taken() {
    MutexLock lock(&mutex_);
    return taken_;
  }
  int calls() {
    MutexLock lock(&mutex_);
    return calls_;
  }

 private:
  using Offer = std::pair<v1::PeerPushRequest, Peer::Callback<v1::PeerPushResponse>>;

  void Take(const v1::PeerPushRequest& request) {
    MutexLock lock(&mutex_);
    for (size_t i = 0; i < KeysIn(request); ++i) {
      taken_.insert(
          PageKey::FromBytes(request.keys().substr(i * sizeof(PageKey), sizeof(PageKey))).value());
    }
  }

  Mutex mutex_;
  Behaviour behaviour_ ABSL_GUARDED_BY(mutex_) = StoredAll;
  bool holding_ ABSL_GUARDED_BY(mutex_) = false;
  int calls_ ABSL_GUARDED_BY(mutex_) = 0;
  std::vector<Offer> held_ ABSL_GUARDED_BY(mutex_);
  std::set<PageKey> taken_ ABSL_GUARDED_BY(mutex_);
};

class PusherTest : public CallFixture {
 protected:
  PusherTest() { options_.retry_min = milliseconds(1); }

  Pusher& Make() {
    pusher_ = std::make_unique<Pusher>(options_, peers_, runs_, grants_, *keyspaces_, Clock::Real(),
                                       counts_);
    return *pusher_;
  }

  // Makes `ids` the view, this node's own "self" with it, and reports it.
  void View(const std::vector<std::string>& ids) {
    PeerTable::Peers peers;
    std::vector<PlacementNode> nodes;
    for (const std::string& id : ids) {
      auto& home = homes_[id];
      if (home == nullptr) home = std::make_shared<Home>(id, breaker_);
      peers.push_back(home);
      nodes.push_back({.id = id, .weight = 1, .host = id, .zone = "", .digest = 0});
    }
    // Its weight is next to none: it is home of nothing as soon as there is another node.
    nodes.push_back({.id = "self", .weight = 1e-9, .host = "self", .zone = "", .digest = 0});
    peers_.SetPeers(peers);
    peers_.history().Install(++epoch_, nodes);
    if (pusher_ != nullptr) pusher_->ViewChanged();
  }

  FragmentHeader Header(int number) const {
    FragmentHeader header;
    header.keyspace = keyspace_->id;
    header.key = Key(number);  // begins a run, because it has no parent
    header.range = kGeometry.all_tiles();
    header.tile_bytes = kGeometry.int2_tile_bytes();
    return header;
  }

  uint64_t Dropped(PushDrop reason) const {
    return counts_.push_dropped[static_cast<size_t>(reason)].value();
  }
  uint64_t AllDropped() const {
    uint64_t sum = 0;
    for (const Counter& counter : counts_.push_dropped) sum += counter.value();
    return sum;
  }
  uint64_t Ended() const {
    return counts_.push_stored_pages.value() + counts_.push_known_pages.value() + AllDropped();
  }

  Pusher::Options options_;
  Breaker::Options breaker_{.failures = 1000, .open_for = milliseconds(20)};
  PeerTable peers_{"self", 1};
  RunFinder runs_{store_, 1 << 16};
  PeerSessions grants_{8};
  ClusterMetrics counts_;
  std::map<std::string, std::shared_ptr<Home>> homes_;
  uint64_t epoch_ = 0;
  std::unique_ptr<Pusher> pusher_;
};

TEST_F(PusherTest, EveryPageEndsInOneCountWhateverHomesDo) {
  const auto seed = std::random_device{}();
  SCOPED_TRACE(seed);
  breaker_ = {.failures = 3, .open_for = milliseconds(2)};
  options_.attempts = 4;
  options_.batch_pages = 7;
  View({"a", "b", "c"});
  Mutex mutex;
  std::mt19937 random(seed);
  for (auto& [id, home] : homes_) {
    home->Behave([&](const v1::PeerPushRequest& request) -> server::PushResult {
      MutexLock lock(&mutex);
      const auto keys = static_cast<uint32_t>(KeysIn(request));
      v1::PeerPushResponse response;
      switch (random() % 7) {
        case 0:
          return absl::UnavailableError("gone");
        case 1:
          return absl::AbortedError("who are you");
        case 2:
          return absl::ResourceExhaustedError("at a bound");
        case 3:
          response.set_failed(keys);  // does not name them
          return response;
        case 4:
          return FailedAll(
              request, random() % 2 == 0 ? v1::MISS_REASON_DEADLINE : v1::MISS_REASON_GENERATION);
        case 5:
          response.set_deduplicated(keys - 1);
          response.set_failed(1);
          response.add_failed_pages(random() % (2 * keys));  // some of them no page at all
          response.add_failed_reasons(v1::MISS_REASON_CORRUPT);
          return response;
        default:
          response.set_stored(keys / 2);
          response.set_deduplicated(keys - keys / 2);
          return response;
      }
    });
  }
  Pusher& pusher = Make();
  constexpr uint64_t kPages = 500;
  for (uint64_t i = 0; i < kPages; ++i) {
    EXPECT_TRUE(pusher.Offer(Header(static_cast<int>(i))));
    if (i == 200) View({"a", "b"});
    if (i == 300) View({"a", "b", "d"});
  }
  EXPECT_TRUE(Eventually([&] { return pusher.pending() == 0; }));
  EXPECT_EQ(Ended(), kPages);
  EXPECT_GT(counts_.push_retried_pages.value(), 0u);
}

TEST_F(PusherTest, PagesOfRangesThatTakeTurnsGoInBatchesOfTheirRange) {
  constexpr int kPages = 40, kRanges = 4;
  options_.batch_pages = 10;
  View({"a"});
  homes_["a"]->Hold();
  std::map<int, std::vector<PageKey>> order;  // keyed by the first head
  Mutex mutex;
  size_t largest = 0;
  homes_["a"]->Behave([&](const v1::PeerPushRequest& request) {
    MutexLock lock(&mutex);
    largest = std::max(largest, KeysIn(request));
    for (size_t i = 0; i < KeysIn(request); ++i) {
      order[static_cast<int>(request.range().head_begin())].push_back(
          PageKey::FromBytes(request.keys().substr(i * sizeof(PageKey), sizeof(PageKey))).value());
    }
    return StoredAll(request);
  });
  Pusher& pusher = Make();
  std::map<int, std::vector<PageKey>> committed;
  for (int page = 0; page < kPages; ++page) {
    for (uint16_t head = 0; head < kRanges; ++head) {
      FragmentHeader header = Header(page);
      header.range.heads = {head, static_cast<uint16_t>(head + 1)};
      EXPECT_TRUE(pusher.Offer(header));
      committed[head].push_back(header.key);
    }
  }
  ASSERT_TRUE(Eventually([&] { return homes_["a"]->held() == 2; }));  // pushes_max
  homes_["a"]->RespondToHeld();
  EXPECT_TRUE(Eventually([&] { return pusher.pending() == 0; }));
  EXPECT_EQ(Ended(), uint64_t{kPages} * kRanges);
  MutexLock lock(&mutex);
  EXPECT_EQ(largest, 10u);
  // The two that were held went before others were queued; each range needs 4, one more for them.
  EXPECT_LE(homes_["a"]->calls(), 2 + 2 + kRanges * (kPages / 10 + 1));
  for (auto& [head, keys] : order) {
    std::sort(keys.begin(), keys.end());
    std::sort(committed[head].begin(), committed[head].end());
    EXPECT_EQ(keys, committed[head]) << "head " << head;
  }
}

TEST_F(PusherTest, APageCommittedWhileAloneIsOfferedWhenAnotherNodeIsThere) {
  View({});
  Pusher& pusher = Make();
  for (int i = 0; i < 40; ++i) EXPECT_TRUE(pusher.Offer(Header(i)));
  EXPECT_TRUE(Eventually([&] { return pusher.pending() == 0; }));
  EXPECT_EQ(Ended(), 0u);
  View({"a"});
  EXPECT_TRUE(Eventually([&] { return homes_["a"]->taken().size() == 40; }));
  EXPECT_TRUE(Eventually([&] { return Ended() == 40; }));
  EXPECT_EQ(AllDropped(), 0u);
}

TEST_F(PusherTest, SoManyWaitForAnotherNodeAndNoMore) {
  options_.queue_pages = 8;
  View({});
  Pusher& pusher = Make();
  for (int i = 0; i < 20; ++i) {
    EXPECT_TRUE(pusher.Offer(Header(i)));
    EXPECT_TRUE(Eventually([&] { return pusher.pending() == 0; }));
  }
  EXPECT_EQ(Dropped(PushDrop::kAlone), 12u);
  View({"a"});
  EXPECT_TRUE(Eventually([&] { return counts_.push_stored_pages.value() == 8; }));
  EXPECT_TRUE(homes_["a"]->taken().contains(Key(19)));
  EXPECT_FALSE(homes_["a"]->taken().contains(Key(0)));
}

TEST_F(PusherTest, WhatWaitsForANodeThatLeavesGoesToTheNextHome) {
  View({"a"});
  homes_["a"]->Hold();
  Pusher& pusher = Make();
  for (int i = 0; i < 500; ++i) pusher.Offer(Header(i));
  ASSERT_TRUE(Eventually([&] { return homes_["a"]->held() == 2; }));  // pushes_max
  View({"b"});
  homes_["a"]->Behave([](const auto&) { return absl::UnavailableError("gone"); });
  homes_["a"]->RespondToHeld();
  EXPECT_TRUE(Eventually([&] { return homes_["b"]->taken().size() == 500; }));
  EXPECT_TRUE(Eventually([&] { return pusher.pending() == 0; }));
  EXPECT_EQ(Ended(), 500u);
  EXPECT_EQ(AllDropped(), 0u);
}

TEST_F(PusherTest, AHomeThatIsSilentForAWhileLosesNothing) {
  breaker_ = {.failures = 1, .open_for = milliseconds(5)};
  options_.attempts = 30;
  View({"a"});
  std::atomic<int> silent{3};
  homes_["a"]->Behave([&](const v1::PeerPushRequest& request) -> server::PushResult {
    if (silent.fetch_sub(1) > 0) return absl::DeadlineExceededError("slow");
    return StoredAll(request);
  });
  Pusher& pusher = Make();
  for (int i = 0; i < 300; ++i) pusher.Offer(Header(i));
  EXPECT_TRUE(Eventually([&] { return counts_.push_stored_pages.value() == 300; }));
  EXPECT_EQ(AllDropped(), 0u);
  EXPECT_EQ(homes_["a"]->taken().size(), 300u);
}

TEST_F(PusherTest, AHomeThatKnowsTheCallerOnlyInAMomentLosesNothing) {
  View({"a"});
  std::atomic<int> strangers{2};
  homes_["a"]->Behave([&](const v1::PeerPushRequest& request) -> server::PushResult {
    if (strangers.fetch_sub(1) > 0) return absl::AbortedError("who are you");
    return StoredAll(request);
  });
  Pusher& pusher = Make();
  pusher.Offer(Header(1));
  EXPECT_TRUE(Eventually([&] { return counts_.push_stored_pages.value() == 1; }));
  EXPECT_EQ(counts_.push_retried_pages.value(), 2u);
  EXPECT_EQ(homes_["a"]->breaker().opened(), 0u);
}

TEST_F(PusherTest, ReasonsAreReported) {
  options_.attempts = 2;
  const std::vector<std::pair<v1::MissReason, PushDrop>> reasons = {
      {v1::MISS_REASON_BUSY, PushDrop::kBusy},
      {v1::MISS_REASON_DEADLINE, PushDrop::kLate},
      {v1::MISS_REASON_ABSENT, PushDrop::kAbsent},
      {v1::MISS_REASON_CORRUPT, PushDrop::kCorrupt},
      {v1::MISS_REASON_GENERATION, PushDrop::kGeneration}};
  View({"a"});
  Pusher& pusher = Make();
  int page = 0;
  for (const auto& [reported, counted] : reasons) {
    homes_["a"]->Behave(
        [reported = reported](const auto& request) { return FailedAll(request, reported); });
    pusher.Offer(Header(page++));
    EXPECT_TRUE(Eventually([&, counted = counted] { return Dropped(counted) == 1; }));
  }
  // Pages whose refusal is final are not offered again.
  EXPECT_EQ(homes_["a"]->calls(), 9);
  homes_["a"]->Behave([](const auto&) { return absl::FailedPreconditionError("wire version"); });
  pusher.Offer(Header(page++));
  EXPECT_TRUE(Eventually([&] { return Dropped(PushDrop::kRefused) == 1; }));
  EXPECT_EQ(homes_["a"]->calls(), 10);
  homes_["a"]->Behave([](const auto&) { return absl::UnavailableError("no route"); });
  pusher.Offer(Header(page++));
  EXPECT_TRUE(Eventually([&] { return Dropped(PushDrop::kSilent) == 1; }));
  FragmentHeader orphan = Header(page++);
  orphan.parent = Key(9999);
  orphan.position = 7;
  pusher.Offer(orphan);
  EXPECT_TRUE(Eventually([&] { return Dropped(PushDrop::kUnplaced) == 1; }));
  EXPECT_EQ(Ended(), static_cast<uint64_t>(page));
}

TEST_F(PusherTest, ANodeOfTheViewThatIsNoPeerIsCounted) {
  options_.attempts = 2;
  View({"a"});
  peers_.SetPeers({});
  Pusher& pusher = Make();
  pusher.Offer(Header(1));
  EXPECT_TRUE(Eventually([&] { return Dropped(PushDrop::kNodeGone) == 1; }));
}

TEST_F(PusherTest, TheQueueIsBoundedAndStoppingCountsWhatIsLeft) {
  options_.queue_pages = 100;
  options_.batch_pages = 10;
  View({"a"});
  homes_["a"]->Hold();
  Pusher& pusher = Make();
  for (int i = 0; i < 300; ++i) pusher.Offer(Header(i));
  // Two batches are with the home.
  EXPECT_GE(Dropped(PushDrop::kQueueFull), 180u);
  EXPECT_LE(Dropped(PushDrop::kQueueFull), 200u);
  ASSERT_TRUE(Eventually([&] { return homes_["a"]->held() == 2; }));
  std::thread stopping([&] { pusher.Stop(); });
  // New pages are refused from here on; offers under way are waited for.
  uint64_t offered = 300;
  EXPECT_TRUE(Eventually([&] {
    ++offered;
    pusher.Offer(Header(1000));
    return Dropped(PushDrop::kStopped) > 0;
  }));
  homes_["a"]->RespondToHeld();
  stopping.join();
  EXPECT_GT(counts_.push_stored_pages.value(), 0u);
  EXPECT_GT(Dropped(PushDrop::kStopped), 1u);
  EXPECT_EQ(Ended(), offered);
  EXPECT_EQ(pusher.pending(), 0u);
}

TEST_F(PusherTest, HomesLearnOfCopiesInOffersOfTheirOwn) {
  View({"a"});
  homes_["a"]->Hold();
  Mutex mutex;
  std::map<bool, size_t> pages;  // keyed by note_only
  std::vector<bool> leaving;
  homes_["a"]->Behave([&](const v1::PeerPushRequest& request) {
    MutexLock lock(&mutex);
    pages[request.note_only()] += KeysIn(request);
    leaving.push_back(request.leaving());
    v1::PeerPushResponse response;
    (request.note_only() ? response.set_noted(static_cast<uint32_t>(KeysIn(request)))
                         : response.set_stored(static_cast<uint32_t>(KeysIn(request))));
    return response;
  });
  Pusher& pusher = Make();
  for (int i = 0; i < 40; ++i) {
    FragmentHeader header = Header(i);
    EXPECT_TRUE(pusher.Offer(header));
    // Its ancestors are not here: the run is known to who pulled it.
    header.key = Key(1000 + i);
    header.parent = Key(2000);
    EXPECT_TRUE(pusher.OfferCopy(header, Key(1000)));
    header.key = Key(3000 + i);
    EXPECT_TRUE(pusher.OfferAgain("a", header, Key(3000)));
  }
  ASSERT_TRUE(Eventually([&] { return homes_["a"]->held() == 2; }));
  homes_["a"]->RespondToHeld();
  EXPECT_TRUE(Eventually([&] { return pusher.pending() == 0; }));
  EXPECT_EQ(counts_.push_noted_pages.value(), 80u);
  EXPECT_EQ(counts_.push_stored_pages.value(), 40u);
  pusher.SetLeaving();
  EXPECT_TRUE(pusher.Offer(Header(99)));
  EXPECT_TRUE(Eventually([&] { return counts_.push_stored_pages.value() == 41; }));
  MutexLock lock(&mutex);
  EXPECT_EQ(pages, (std::map<bool, size_t>{{false, 41}, {true, 80}}));
  EXPECT_TRUE(leaving.back());
  EXPECT_FALSE(leaving.front());
}

TEST_F(PusherTest, CopiesLeaveHalfOfTheQueueToCommits) {
  options_.queue_pages = 100;
  View({"a"});
  homes_["a"]->Hold();
  Pusher& pusher = Make();
  for (int i = 0; i < 300; ++i) pusher.OfferCopy(Header(i), Key(i));
  const uint64_t dropped = Dropped(PushDrop::kQueueFull);
  EXPECT_GE(dropped, 100u);
  EXPECT_FALSE(pusher.OfferAgain("a", Header(0), Key(0)));
  for (int i = 0; i < 50; ++i) EXPECT_TRUE(pusher.Offer(Header(500 + i)));
  homes_["a"]->RespondToHeld();
  EXPECT_TRUE(Eventually([&] { return pusher.pending() == 0; }));
}

// Each would be a call inside the one before.
TEST_F(PusherTest, ThousandsOfSmallBatchesForAHomeThatIsNotCalled) {
  breaker_ = {.failures = 1, .open_for = std::chrono::hours(1)};
  options_.attempts = 1;
  View({"a"});
  homes_["a"]->breaker().Fail(Breaker::Of::kCalls);
  Pusher& pusher = Make();
  constexpr int kPages = 16'000;
  for (int i = 0; i < kPages; ++i) {
    FragmentHeader header = Header(i);
    const auto head = static_cast<uint16_t>(i % 2);  // two ranks by turns
    header.range.heads = {head, static_cast<uint16_t>(head + 1)};
    EXPECT_TRUE(pusher.Offer(header));
  }
  EXPECT_TRUE(Eventually([&] { return Dropped(PushDrop::kBreaker) == kPages; }));
  EXPECT_EQ(homes_["a"]->calls(), 0);
}

}  // namespace
}  // namespace crumb::server
