// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
// Reoffer: homes that are new, or whose process is, receive every page here once, and others of
// none.
#include "server/cluster/reoffer.h"

#include <gmock/gmock.h>

#include <set>

#include "tests/common/eventually.h"
#include "tests/server/call_fixture.h"

namespace crumb::server {
namespace {

// A home that records the offers that it receives.
class NotingHome final : public Peer {
 public:
  NotingHome(const std::string& id, const std::string& incarnation)
      : Peer(RecordOf(id, incarnation), {.failures = 5, .open_for = std::chrono::seconds(1)},
             Clock::Real()) {}
  static v1::NodeRecord RecordOf(const std::string& id, const std::string& incarnation) {
    v1::NodeRecord record;
    record.set_id(id);
    record.set_incarnation(incarnation);
    return record;
  }
  void Acquire(v1::PeerAcquireRequest, TimePoint,
               Callback<v1::PeerAcquireResponse> reply) override {
    reply(absl::UnimplementedError("not in this test"));
  }
  void Release(uint64_t) override {}
  void Push(v1::PeerPushRequest request, TimePoint, Callback<v1::PeerPushResponse> reply) override {
    v1::PeerPushResponse response;
    {
      MutexLock lock(&mutex_);
      const size_t keys = request.keys().size() / sizeof(PageKey);
      for (size_t i = 0; i < keys; ++i) {
        const auto key =
            PageKey::FromBytes(request.keys().substr(i * sizeof(PageKey), sizeof(PageKey)));
        received_.insert(key.value());
      }
      whole_ &= request.range().layer_end() == 2 && request.range().head_end() == 2;
      note_only_ &= request.note_only();
      response.set_noted(static_cast<uint32_t>(keys));
    }
    reply(std::move(response));
  }
  void Keyspaces(v1::PeerKeyspacesRequest, TimePoint,
                 Callback<v1::PeerKeyspacesResponse> reply) override {
    reply(absl::UnimplementedError("not in this test"));
  }
  void Drain(TimePoint, Callback<v1::PeerDrainResponse> reply) override {
    reply(absl::UnimplementedError("not in this test"));
  }
  void Fetch(transport::FetchRequest, transport::FetchDone) override {}
  const char* transport() const override { return "fake"; }

  std::multiset<PageKey> received() {
    MutexLock lock(&mutex_);
    return received_;
  }
  // Returns true if every offer was of whole pages and requested no copy.
  bool proper() {
    MutexLock lock(&mutex_);
    return whole_ && note_only_;
  }

 private:
  Mutex mutex_;
  std::multiset<PageKey> received_ ABSL_GUARDED_BY(mutex_);
  bool whole_ ABSL_GUARDED_BY(mutex_) = true;
  bool note_only_ ABSL_GUARDED_BY(mutex_) = true;
};

class ReofferTest : public CallFixture {
 protected:
  static constexpr int kPages = 12;

  ReofferTest() {
    for (int i = 0; i < kPages; ++i) Store(Key(i));  // each begins a run
  }
  ~ReofferTest() override {
    reoffer_.Stop();
    pusher_.Stop();
  }

  // Makes these nodes the peers, and the view with "self".
  void Nodes(const std::vector<std::shared_ptr<NotingHome>>& homes) {
    PeerTable::Peers peers;
    std::vector<PlacementNode> view;
    view.push_back({.id = "self", .weight = 1, .host = "self", .zone = "", .digest = 0});
    for (const auto& home : homes) {
      peers.push_back(home);
      view.push_back({.id = home->id(), .weight = 1, .host = home->id(), .zone = "", .digest = 0});
    }
    peers_.SetPeers(peers);
    peers_.history().Install(++epoch_, view);
    reoffer_.NodesChanged();
  }
  // The pages of which a node is the home in the newest view.
  std::multiset<PageKey> PagesOf(const std::string& id) {
    std::multiset<PageKey> pages;
    for (int i = 0; i < kPages; ++i) {
      if (peers_.HomesOfRun(Key(i)).current.at(0) == id) pages.insert(Key(i));
    }
    return pages;
  }
  bool Walked(uint64_t walks) {
    return Eventually([&] { return reoffer_.walks() == walks && pusher_.pending() == 0; });
  }

  PeerTable peers_{"self", 1};
  RunFinder runs_{store_, 1 << 16};
  PeerSessions grants_{8};
  ClusterMetrics counts_;
  uint64_t epoch_ = 0;
  Pusher pusher_{{}, peers_, runs_, grants_, *keyspaces_, Clock::Real(), counts_};
  Reoffer reoffer_{{store_, *keyspaces_, peers_, runs_, pusher_, 1, 1'000'000}};
};

TEST_F(ReofferTest, NewHomesReceiveTheirPagesAndOthersNone) {
  const auto a = std::make_shared<NotingHome>("a", "1");
  Nodes({a});
  ASSERT_TRUE(Walked(1));
  EXPECT_EQ(a->received(), PagesOf("a"));
  EXPECT_FALSE(a->received().empty());
  const std::multiset<PageKey> first = a->received();
  // A new node receives only its own pages.
  const auto b = std::make_shared<NotingHome>("b", "1");
  Nodes({a, b});
  ASSERT_TRUE(Walked(2));
  EXPECT_EQ(b->received(), PagesOf("b"));
  EXPECT_EQ(a->received(), first);
  // A node that leaves: its pages have another home.
  Nodes({a});
  ASSERT_TRUE(Walked(3));
  std::multiset<PageKey> again = first;
  for (const PageKey& page : b->received()) {
    if (PagesOf("a").contains(page)) again.insert(page);
  }
  EXPECT_EQ(a->received(), again);
  EXPECT_TRUE(a->proper());
}

TEST_F(ReofferTest, AProcessThatHasForgottenReceivesAllAgain) {
  const auto before = std::make_shared<NotingHome>("a", "1");
  Nodes({before});
  ASSERT_TRUE(Walked(1));
  const auto after = std::make_shared<NotingHome>("a", "2");
  Nodes({after});
  ASSERT_TRUE(Walked(2));
  EXPECT_EQ(after->received(), PagesOf("a"));
  EXPECT_EQ(after->received(), before->received());
  // Nothing has changed: no walk, and no offer.
  reoffer_.NodesChanged();
  Nodes({after, std::make_shared<NotingHome>("b", "1")});
  ASSERT_TRUE(Walked(3));
  EXPECT_EQ(after->received(), before->received());
}

}  // namespace
}  // namespace crumb::server
