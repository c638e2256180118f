// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
// The worst well-formed requests of sessions and device pools, with Lookups beside them:
// worst_requests_test.cc.
#include <fcntl.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "common/roster.h"
#include "server/calls/device_calls.h"
#include "server/calls/keyspace_calls.h"
#include "server/calls/staging_calls.h"
#include "server/device/device_pools.h"
#include "tests/server/calls/worst_requests_fixture.h"

namespace crumb::server {
namespace {

constexpr int kFragments = 4'096;  // limits.commit_fragments_max
constexpr TileRange kOneTile = {{0, 1}, {0, 1}};

using WorstSessionRequestsTest = WorstRequestsTest;

// Staging memory full of fragments of one tile, all of which are stored.
TEST_F(WorstSessionRequestsTest, CommitOfAsManyFragmentsAsItMayName) {
  const size_t bytes = FragmentBytes(1, kWideGeometry.int2_tile_bytes());
  const auto session = sessions_.Open({"test", "", 0, uint64_t{64} << 20, ""}).value();
  int family = 1;
  v1::CommitRequest commit;
  commit.set_keyspace(std::string(keyspace_->id.view()));
  const auto prepare = [&] {
    v1::ReserveRequest reserve;
    reserve.set_count(kFragments);
    reserve.set_fragment_bytes(bytes);
    v1::ReserveResponse reserved;
    ASSERT_TRUE(Reserve(context_, *session, reserve, &reserved).ok());
    ASSERT_EQ(reserved.offsets_size(), kFragments);
    commit.clear_header_offsets();
    *commit.mutable_offsets() = reserved.offsets();
    const auto area = session->staging();
    const Mapping staging =
        Mapping::Of(area->fd(), uint64_t{64} << 20, Mapping::Access::kReadWrite).value();
    for (int i = 0; i < kFragments; ++i) {
      std::byte* const at = staging.data() + reserved.offsets(i);
      std::memset(at, 0, bytes);
      EncodeFragmentHeader(
          HeaderOf(FamilyKey(family, i), i == 0 ? PageKey() : FamilyKey(family, i - 1), kOneTile),
          std::span(at + kWideGeometry.int2_tile_bytes(), bytes - kWideGeometry.int2_tile_bytes()));
      commit.add_header_offsets(kWideGeometry.int2_tile_bytes());
    }
    ++family;
  };
  ExpectHarmless(
      [&] {
        v1::CommitResponse response;
        Await([&](Done done) { Commit(context_, *session, commit, &response, std::move(done)); });
        EXPECT_EQ(response.outcomes_size(), kFragments);
        EXPECT_EQ(response.first_error(), "");
      },
      prepare);
}

constexpr char kEngine[] = "engine-of-ranks!";  // engine ids have 16 bytes

// A lease of as many pages as a request may name, joined by another process of the engine.
TEST_F(WorstSessionRequestsTest, JoinOfALeaseOfAsManyPagesAsItMayHave) {
  StoreChain(1, kKeysMax);
  const auto leader = sessions_.Open({"leader", kEngine, 0, 0, ""}).value();
  const auto follower = sessions_.Open({"follower", kEngine, 0, 0, ""}).value();
  v1::AcquireResponse leased;
  const auto wanted = Made<v1::AcquireRequest>(FamilyKeys(1, kKeysMax));
  Await([&](const Done& done) {
    Acquire(context_, leader, TimePoint::max(), wanted, &leased, done);
  });
  ASSERT_EQ(leased.hit_pages(), static_cast<uint32_t>(kKeysMax));
  v1::AcquireRequest join = Made<v1::AcquireRequest>("");
  join.set_lease(leased.lease());
  ExpectHarmless([&] {
    v1::AcquireResponse response;
    Await([&](const Done& done) {
      Acquire(context_, follower, TimePoint::max(), join, &response, done);
    });
    EXPECT_EQ(response.hit_pages(), static_cast<uint32_t>(kKeysMax));
    v1::ReleaseRequest release;
    release.add_leases(response.lease());
    v1::ReleaseResponse released;
    EXPECT_TRUE(Release(context_, *follower, release, &released).ok());
  });
}

// Each change is a notice for every session.
TEST_F(WorstSessionRequestsTest, SetKeyspaceStateWithAsManySessionsAsThereMayBe) {
  std::vector<std::shared_ptr<Session>> sessions;
  std::vector<std::shared_ptr<NoticeQueue>> notices;
  for (int64_t i = sessions_.List().size(); i < SessionLimits().sessions_max; ++i) {
    auto session = sessions_.Open({"reader", "", 0, 0, ""});
    if (!session.ok()) break;
    sessions.push_back(*session);
    notices.push_back(std::make_shared<NoticeQueue>(
        size_t{65'536}, [] {}, "", &events_.notice_bytes()));
    ASSERT_TRUE(sessions.back()->OpenNotices(notices.back()));
  }
  ASSERT_GT(sessions.size(), 100u);
  v1::SetKeyspaceStateRequest request;
  request.set_keyspace(std::string(keyspace_->id.view()));
  request.set_state(v1::KEYSPACE_STATE_ACTIVE);
  request.set_who(std::string(512, 'w'));
  request.set_reason(std::string(512, 'r'));
  ExpectHarmless([&] {
    for (int i = 0; i < 100; ++i) {
      Await([&](Done done) { SetKeyspaceState(context_, request, std::move(done)); });
    }
  });
  EXPECT_LT(events_.notice_bytes().used(), sessions.size() * 1'024) << "one state a keyspace";
}

// Calls of a process that takes part in a pool with as many slots as a call may name.
class WorstPoolRequestsTest : public WorstRequestsTest {
 protected:
  WorstPoolRequestsTest()
      : tier_({.device = {}, .is_below = [](const storage::FragmentMeta&) { return false; }},
              Clock::Real(), {}),
        pools_(PoolOptions(), &tier_, Clock::Real(), metrics_) {
    sessions_.SetMemory(&pools_);
    context_.pools = &pools_;
    v1::PoolRequest join;
    join.mutable_join()->set_device(std::string(16, 'd'));
    join.mutable_join()->set_slot_bytes(slot_bytes());
    join.mutable_join()->set_handle_bytes(2 * kFragments * slot_bytes());
    pool_ = pools_.Handle(session_, join, {}).response.pool();
    v1::PoolRequest offer;
    offer.mutable_offer()->set_pool(pool_);
    std::vector<UniqueFd> handle;
    handle.push_back(CreateRoster().value());  // any memory file
    EXPECT_EQ(pools_.Handle(session_, offer, std::move(handle)).response.code(), 0u);
  }

  static uint64_t slot_bytes() { return (kWideGeometry.int2_tile_bytes() + 127) / 128 * 128; }

  // Slots that the session holds.
  std::vector<uint64_t> ReserveAll() {
    v1::ReserveRequest request;
    request.set_pool(pool_);
    request.set_count(kFragments);
    v1::ReserveResponse response;
    EXPECT_TRUE(Reserve(context_, *session_, request, &response).ok());
    EXPECT_EQ(response.slots_size(), kFragments);
    return {response.slots().begin(), response.slots().end()};
  }
  void ReleaseAll(const std::vector<uint64_t>& slots) {
    v1::ReleaseRequest request;
    request.set_pool(pool_);
    request.mutable_slots()->Assign(slots.begin(), slots.end());
    v1::ReleaseResponse response;
    EXPECT_TRUE(Release(context_, *session_, request, &response).ok());
  }
  // Commits a chain of pages to the slots.
  v1::CommitRequest CommitOf(const std::vector<uint64_t>& slots, int family) const {
    v1::CommitRequest request;
    request.set_keyspace(std::string(keyspace_->id.view()));
    request.set_pool(pool_);
    for (size_t i = 0; i < slots.size(); ++i) {
      const int page = static_cast<int>(i);
      request.add_slots(slots[i]);
      request.add_headers(ToBytes(HeaderOf(
          FamilyKey(family, page), page == 0 ? PageKey() : FamilyKey(family, page - 1), kOneTile)));
    }
    return request;
  }
  void CommitAll(const v1::CommitRequest& request) {
    v1::CommitResponse response;
    Await([&](Done done) { Commit(context_, *session_, request, &response, std::move(done)); });
    EXPECT_EQ(response.outcomes_size(), request.slots_size());
    EXPECT_EQ(response.first_error(), "");
  }

  storage::DeviceTier tier_;
  DevicePools pools_;
  std::string pool_;
};

TEST_F(WorstPoolRequestsTest, CommitOfAsManySlotsAsItMayName) {
  int family = 1;
  std::vector<uint64_t> slots;
  v1::CommitRequest request;
  ExpectHarmless([&] { CommitAll(request); },
                 [&] {
                   ReleaseAll(slots);
                   slots = ReserveAll();
                   request = CommitOf(slots, family++);
                 });
}

TEST_F(WorstPoolRequestsTest, ScrubOfAsManySlotsAsItMayName) {
  const std::vector<uint64_t> slots = ReserveAll();
  CommitAll(CommitOf(slots, 1));
  v1::ScrubSlotsRequest request;
  request.set_pool(pool_);
  request.mutable_slots()->Assign(slots.begin(), slots.end());
  ExpectHarmless([&] {
    v1::ScrubSlotsResponse response;
    EXPECT_TRUE(ScrubSlots(context_, *session_, request, &response).ok());
    EXPECT_EQ(response.headers_size(), kFragments);
  });
}

// An earlier crumbd had the pool, and its processes report the pages that their slots have.
TEST_F(WorstPoolRequestsTest, ClaimOfAsManySlotsAsItMayName) {
  const UniqueFd roster = CreateRoster().value();
  const RosterMark absent =
      RosterMark::Take(roster.get()).value();  // The process of this mark is away.
  pool_ = std::string(16, 'q');
  v1::PoolRequest join;
  join.mutable_join()->set_pool(pool_);
  join.mutable_join()->set_device(std::string(16, 'e'));
  join.mutable_join()->set_slot_bytes(slot_bytes());
  join.mutable_join()->set_handle_bytes(kAttempts * kFragments * slot_bytes());
  std::vector<UniqueFd> fds;
  fds.push_back(UniqueFd(::fcntl(roster.get(), F_DUPFD_CLOEXEC, 0)));
  ASSERT_EQ(pools_.Handle(session_, join, std::move(fds)).response.code(), 0u);
  v1::PoolRequest offer;
  offer.mutable_offer()->set_pool(pool_);
  offer.mutable_offer()->set_number(0);
  std::vector<UniqueFd> handle;
  handle.push_back(CreateRoster().value());  // any memory file
  ASSERT_EQ(pools_.Handle(session_, offer, std::move(handle)).response.code(), 0u);
  v1::ClaimSlotsRequest request;
  int attempt = 0;
  ExpectHarmless(
      [&] {
        v1::ClaimSlotsResponse response;
        EXPECT_TRUE(ClaimSlots(context_, *session_, request, &response).ok());
        EXPECT_EQ(std::count(response.claimed().begin(), response.claimed().end(), true),
                  kFragments);
      },
      [&] {
        std::vector<uint64_t> slots(kFragments);
        std::iota(slots.begin(), slots.end(), static_cast<uint64_t>(attempt) * kFragments);
        const v1::CommitRequest pages = CommitOf(slots, ++attempt);
        request.Clear();
        request.set_pool(pool_);
        request.set_keyspace(pages.keyspace());
        *request.mutable_slots() = pages.slots();
        *request.mutable_headers() = pages.headers();
      });
}

}  // namespace
}  // namespace crumb::server
