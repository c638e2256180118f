// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "server/calls/device_calls.h"

#include <atomic>
#include <functional>
#include <future>
#include <thread>

#include "gmock/gmock.h"
#include "tests/common/eventually.h"
#include "tests/server/device_calls_fixture.h"

namespace crumb::server {
namespace {

using testing::ElementsAre;
using testing::SizeIs;

TEST_F(DeviceCallsTest, ACommittedSlotIsVisibleAndHeldUntilReleased) {
  const auto session = OpenSession();
  const std::string pool = Join(session);
  const auto slots = Reserve(*session, pool, 2);
  ASSERT_THAT(slots, SizeIs(2));
  v1::CommitResponse response;
  ASSERT_TRUE(Commit(session, pool, slots[0], Header(0), &response).ok());
  EXPECT_THAT(response.outcomes(), ElementsAre(v1::COMMIT_OUTCOME_STORED));
  response.Clear();
  ASSERT_TRUE(Commit(session, pool, slots[1], Header(0), &response).ok());
  EXPECT_THAT(response.outcomes(), ElementsAre(v1::COMMIT_OUTCOME_DEDUPLICATED));
  EXPECT_TRUE(Release(*session, pool, slots).ok());
  EXPECT_TRUE(absl::IsInvalidArgument(Release(*session, pool, slots)));
}

TEST_F(DeviceCallsTest, SlotsOfAnotherSessionAreNotTouched) {
  const auto owner = OpenSession();
  const auto thief = OpenSession();
  const std::string pool = Join(owner);
  EXPECT_EQ(Join(thief), pool);
  const auto slots = Reserve(*owner, pool, 1);
  v1::CommitResponse response;
  ASSERT_TRUE(Commit(thief, pool, slots[0], Header(0), &response).ok());
  EXPECT_THAT(response.outcomes(), ElementsAre(v1::COMMIT_OUTCOME_REFUSED));
  EXPECT_THAT(response.first_error(), testing::HasSubstr("slots"));
  EXPECT_TRUE(absl::IsInvalidArgument(Release(*thief, pool, slots)));
  EXPECT_EQ(tier_.slots().HeldBy(1, owner->token().slot()), 1u);
}

TEST_F(DeviceCallsTest, APoolIsForThoseWhoTakePart) {
  const auto member = OpenSession();
  const auto stranger = OpenSession();
  const std::string pool = Join(member);
  v1::ReserveRequest request;
  request.set_pool(pool);
  request.set_count(1);
  v1::ReserveResponse response;
  EXPECT_TRUE(absl::IsInvalidArgument(server::Reserve(context_, *stranger, request, &response)));
  request.set_pool(std::string(16, 'x'));
  EXPECT_TRUE(absl::IsInvalidArgument(server::Reserve(context_, *member, request, &response)));
  request.set_pool(pool);
  request.set_count(0);
  EXPECT_TRUE(absl::IsInvalidArgument(server::Reserve(context_, *member, request, &response)));
  v1::PoolRequest fetch;
  fetch.mutable_fetch()->set_pool(pool);
  EXPECT_EQ(Code(stranger, fetch), kInvalid);
  v1::PoolRequest offer;
  offer.mutable_offer()->set_pool(pool);
  EXPECT_EQ(Code(stranger, offer, OneFd()), kInvalid);
}

TEST_F(DeviceCallsTest, TenantsHavePoolsOfTheirOwn) {
  const auto mine = OpenSession();
  const auto theirs = OpenSessionOf("b");
  const std::string pool = Join(mine);
  EXPECT_NE(Join(theirs), pool);
  v1::PoolRequest join = JoinRequest();
  join.mutable_join()->set_pool(pool);
  EXPECT_EQ(Code(theirs, join), kInvalid);
  EXPECT_EQ(pools_.OfTenant(*theirs, pool), 0u);
  v1::AcquireRequest acquire;
  acquire.add_pools(pool);
  EXPECT_THAT(PoolsOf(context_, *theirs, acquire), testing::Not(testing::Contains(1u)));
}

TEST_F(DeviceCallsTest, RefusesHeadersThatCannotBeRight) {
  const auto session = OpenSession();
  const std::string pool = Join(session);
  const auto slots = Reserve(*session, pool, 1);
  std::string damaged = Header(0);
  damaged[40] = static_cast<char>(damaged[40] ^ 1);
  FragmentHeader header =
      DecodeFragmentHeader(std::as_bytes(std::span(Header(0).data(), Header(0).size()))).value();
  header.range.layers.end = 3;  // the keyspace has 2
  header.tile_sums.resize(static_cast<size_t>(header.range.tiles()));
  for (const std::string& wrong : {damaged, std::string(), std::string(10, 'x'), ToBytes(header)}) {
    v1::CommitResponse response;
    ASSERT_TRUE(Commit(session, pool, slots[0], wrong, &response).ok());
    EXPECT_THAT(response.outcomes(), ElementsAre(v1::COMMIT_OUTCOME_REFUSED));
  }
  v1::CommitResponse response;
  ASSERT_TRUE(Commit(session, pool, slots[0], Header(0), &response).ok());
  EXPECT_THAT(response.outcomes(), ElementsAre(v1::COMMIT_OUTCOME_STORED));
}

TEST_F(DeviceCallsTest, ARepeatedReserveReturnsTheSameSlots) {
  const auto session = OpenSession();
  const std::string pool = Join(session);
  const auto first = Reserve(*session, pool, 2, 7);
  EXPECT_EQ(Reserve(*session, pool, 2, 7), first);
  EXPECT_NE(Reserve(*session, pool, 2, 8), first);
  EXPECT_EQ(tier_.slots().HeldBy(1, session->token().slot()), 4u);
}

// A response stays below the clients' limit: checksums that do not fit are left out, places are
// not. A disconnected session ends as soon as it holds nothing, though its process lives: a slot
// that a call gave it at that moment would be free for others while the process writes to it.
TEST_F(DeviceCallsTest, ASessionThatClosesDuringAReserveGetsNoSlots) {
  const auto other = OpenSession();
  const std::string pool = Join(other);
  ASSERT_NO_FATAL_FAILURE(FillPool(other, pool));
  const auto session = OpenSession();
  Join(session);
  const std::vector<uint64_t> held = Reserve(*session, pool, 1, 1);
  ASSERT_THAT(held, SizeIs(1));
  while_evicting_ = [&] { sessions_.Disconnect(session); };
  EXPECT_THAT(Reserve(*session, pool, 8, 2), SizeIs(0));
  EXPECT_EQ(while_evicting_, nullptr);
  EXPECT_EQ(session->phase(), Session::Phase::kDisconnected);
  EXPECT_EQ(tier_.slots().HeldBy(pools_.OfTenant(*other, pool), session->token().slot()), 1u);
  EXPECT_TRUE(pools_.Sealed(*session, pools_.OfTenant(*other, pool)));
}

// Its caller gave the first call up and repeated it while crumbd served it still. Were both served,
// the slots of one of them would be held, and the process would never know.
TEST_F(DeviceCallsTest, AReserveIsNotServedBesideItself) {
  const auto session = OpenSession();
  const std::string pool = Join(session);
  ASSERT_NO_FATAL_FAILURE(FillPool(session, pool));
  v1::ReserveRequest request;
  request.set_pool(pool);
  request.set_count(1);
  request.set_request(5);
  v1::ReserveResponse repeated;
  absl::Status status;
  while_evicting_ = [&] { status = server::Reserve(context_, *session, request, &repeated); };
  const std::vector<uint64_t> slots = Reserve(*session, pool, 1, 5);
  EXPECT_TRUE(absl::IsUnavailable(status)) << status;
  EXPECT_EQ(repeated.slots_size(), 0);
  EXPECT_THAT(slots, SizeIs(1));
  EXPECT_EQ(Reserve(*session, pool, 1, 5), slots);
  EXPECT_THAT(Reserve(*session, pool, 1, 4), SizeIs(0));  // its response had come before
  EXPECT_EQ(tier_.slots().HeldBy(pools_.OfTenant(*session, pool), session->token().slot()), 1u);
}

TEST_F(DeviceCallsTest, SumsThatDoNotFitAreLeftOut) {
  const auto session = OpenSession();
  const std::string pool = Join(session);
  std::vector<storage::DeviceFragmentRef> found;
  for (uint32_t page = 0; page < 20; ++page) {
    const std::string header = Header(page);
    found.push_back({.page = page,
                     .pool = 1,
                     .slot = page,
                     .header = std::make_shared<const FragmentHeader>(
                         DecodeFragmentHeader(std::as_bytes(std::span(header))).value())});
  }
  const size_t bytes = Header(0).size();
  const auto with_sums = [&](const v1::AcquireRequest& request, size_t room) {
    limits_.device_sums_bytes_max = ByteSize{room};
    v1::DeviceFragments fragments;
    FillDeviceFragments(context_, *session, request, found, &fragments);
    EXPECT_EQ(fragments.slots_size(), 20);
    EXPECT_EQ(fragments.headers_size(), request.device_sums() || request.peers_size() > 0 ? 20 : 0);
    return std::count_if(fragments.headers().begin(), fragments.headers().end(),
                         [](const std::string& header) { return !header.empty(); });
  };
  v1::AcquireRequest of_peer;
  of_peer.add_peers(pool);
  EXPECT_EQ(with_sums(of_peer, 20 * bytes), 20);
  EXPECT_EQ(context_.metrics.rejected[static_cast<size_t>(Rejection::kDeviceSums)].value(), 0u);
  EXPECT_EQ(with_sums(of_peer, 5 * bytes + 1), 5);
  EXPECT_EQ(context_.metrics.rejected[static_cast<size_t>(Rejection::kDeviceSums)].value(), 1u);
  v1::AcquireRequest in_place;
  in_place.add_pools(pool);
  EXPECT_EQ(with_sums(in_place, 5 * bytes), 0);
  in_place.set_device_sums(true);
  EXPECT_EQ(with_sums(in_place, 5 * bytes), 5);
}

// A caller that begins before all sums are there receives some of them, and no header.
TEST_F(DeviceCallsTest, SumsOfSomeTilesComeWithoutHeaders) {
  const auto session = OpenSession();
  const std::string pool = Join(session);
  std::vector<storage::DeviceFragmentRef> found;
  std::string expected;
  const TileRange all = keyspace_->geometry.all_tiles();
  const IndexRange heads = {1, all.heads.end};
  for (uint32_t page = 0; page < 20; ++page) {
    const std::string bytes = Header(static_cast<int>(page));
    FragmentHeader header = DecodeFragmentHeader(std::as_bytes(std::span(bytes))).value();
    if (page == 7) {  // lacks a tile
      header.range.layers.begin = 1;
      header.tile_sums.erase(header.tile_sums.begin(), header.tile_sums.begin() + all.heads.size());
    } else {
      expected.append(reinterpret_cast<const char*>(&header.tile_sums[heads.begin]),
                      sizeof(uint32_t) * static_cast<size_t>(heads.size()));
    }
    found.push_back({.page = page,
                     .pool = 1,
                     .slot = page,
                     .header = std::make_shared<const FragmentHeader>(std::move(header))});
  }
  v1::AcquireRequest request;
  request.add_peers(pool);
  request.mutable_peer_sums()->set_layer_end(1);
  request.mutable_peer_sums()->set_head_begin(heads.begin);
  request.mutable_peer_sums()->set_head_end(heads.end);
  v1::DeviceFragments fragments;
  FillDeviceFragments(context_, *session, request, found, &fragments);
  EXPECT_EQ(fragments.slots_size(), 20);
  EXPECT_EQ(fragments.headers_size(), 0);
  EXPECT_EQ(fragments.sums(), expected);
  limits_.device_sums_bytes_max = ByteSize{expected.size() - 1};
  v1::DeviceFragments cut;
  FillDeviceFragments(context_, *session, request, found, &cut);
  EXPECT_EQ(cut.slots_size(), 20);
  EXPECT_TRUE(cut.sums().empty());
  EXPECT_EQ(context_.metrics.rejected[static_cast<size_t>(Rejection::kDeviceSums)].value(), 1u);
  v1::AcquireRequest in_place = request;
  in_place.clear_peers();
  in_place.add_pools(pool);
  v1::DeviceFragments own;
  FillDeviceFragments(context_, *session, in_place, found, &own);
  EXPECT_TRUE(own.sums().empty());
}

TEST_F(DeviceCallsTest, SumsOfTilesThatAKeyspaceLacksAreRefused) {
  const auto session = OpenSession();
  const TileRange all = keyspace_->geometry.all_tiles();
  for (const uint32_t end : {0u, all.layers.end + 1u, 65537u, UINT32_MAX}) {
    v1::AcquireRequest request;
    request.set_keyspace(std::string(keyspace_->id.view()));
    request.set_keys(std::string(Key(0).view()));
    request.mutable_peer_sums()->set_layer_end(end);
    request.mutable_peer_sums()->set_head_end(1);
    for (const uint64_t lease : {0u, 5u}) {
      request.set_request(1 + end + lease);
      request.set_lease(lease);
      v1::AcquireResponse response;
      Completion completion;
      server::Acquire(context_, session, TimePoint::max(), request, &response, completion.done());
      EXPECT_TRUE(absl::IsInvalidArgument(completion.status)) << end << " " << completion.status;
    }
  }
}

TEST_F(DeviceCallsTest, DamagedPagesLeaveThePool) {
  const auto session = OpenSession();
  const std::string pool = Join(session);
  const std::vector<uint64_t> slots = Reserve(*session, pool, 3);
  v1::CommitResponse committed;
  ASSERT_TRUE(Commit(session, pool, slots[0], Header(0), &committed).ok());
  ASSERT_TRUE(Commit(session, pool, slots[1], Header(1), &committed).ok());
  v1::ScrubSlotsRequest scrub;
  scrub.set_pool(pool);
  for (const uint64_t slot : slots) scrub.add_slots(slot);
  scrub.add_slots(uint64_t{1} << 40);
  v1::ScrubSlotsResponse response;
  ASSERT_TRUE(ScrubSlots(context_, *session, scrub, &response).ok());
  EXPECT_THAT(response.headers(), ElementsAre(Header(0), Header(1), "", ""));
  // With the key of another page nothing happens.
  scrub.add_damaged(slots[1]);
  EXPECT_TRUE(absl::IsInvalidArgument(ScrubSlots(context_, *session, scrub, &response)));
  const auto key = [&](int page) {
    const std::string bytes = Header(page);
    const auto header = DecodeFragmentHeader(std::as_bytes(std::span(bytes))).value();
    return std::string(reinterpret_cast<const char*>(&header.key), sizeof(header.key));
  };
  scrub.set_damaged_keys(key(0));
  response.Clear();
  ASSERT_TRUE(ScrubSlots(context_, *session, scrub, &response).ok());
  EXPECT_EQ(response.withdrawn(), 0u);
  scrub.set_damaged_keys(key(1));
  for (const uint32_t withdrawn : {1u, 0u}) {
    response.Clear();
    ASSERT_TRUE(ScrubSlots(context_, *session, scrub, &response).ok());
    EXPECT_EQ(response.withdrawn(), withdrawn);
    // A holder may look at it again.
    EXPECT_THAT(response.headers(), ElementsAre(Header(0), Header(1), "", ""));
  }
  storage::StoreStats stats;
  tier_.AddStats(stats);
  EXPECT_EQ(stats.verify_failures_device, 1u);
  EXPECT_EQ(stats.device.evicted.corrupt, 1u);
  EXPECT_EQ(stats.device.pages, 1u);
  // Its slot is free once it has no holder, and is not marked as damaged any more.
  ASSERT_TRUE(Release(*session, pool, {slots[1]}).ok());
  response.Clear();
  ASSERT_TRUE(ScrubSlots(context_, *session, scrub, &response).ok());
  EXPECT_EQ(response.withdrawn(), 0u);
  EXPECT_THAT(response.headers(), ElementsAre(Header(0), "", "", ""));
  const auto stranger = OpenSession();
  EXPECT_TRUE(absl::IsInvalidArgument(ScrubSlots(context_, *stranger, scrub, &response)));
}

TEST_F(DeviceCallsTest, HeadersOfSlotsAreBoundedAndEachSlotIsNamedOnce) {
  const auto session = OpenSession();
  const std::string pool = Join(session);
  const std::vector<uint64_t> slots = Reserve(*session, pool, 2);
  v1::CommitResponse committed;
  ASSERT_TRUE(Commit(session, pool, slots[0], Header(0), &committed).ok());
  ASSERT_TRUE(Commit(session, pool, slots[1], Header(1), &committed).ok());
  v1::ScrubSlotsRequest scrub;
  scrub.set_pool(pool);
  for (const uint64_t slot : slots) scrub.add_slots(slot);
  limits_.device_sums_bytes_max = ByteSize{Header(0).size() + 1};
  v1::ScrubSlotsResponse response;
  ASSERT_TRUE(ScrubSlots(context_, *session, scrub, &response).ok());
  EXPECT_THAT(response.headers(), ElementsAre(Header(0), "")) << "there is room for one";
  EXPECT_EQ(Rejected(Rejection::kDeviceSums), 1u);
  scrub.add_slots(slots[0]);
  response.Clear();
  EXPECT_TRUE(absl::IsInvalidArgument(ScrubSlots(context_, *session, scrub, &response)));
  EXPECT_EQ(response.headers_size(), 0);
}

TEST_F(DeviceCallsTest, AnAcquireNamesAFewPools) {
  const auto session = OpenSession();
  Join(session);
  v1::AcquireRequest request;
  request.set_keyspace(std::string(keyspace_->id.view()));
  request.set_keys(std::string(Key(0).view()));
  for (size_t i = 0; i < pools_.named_max(); ++i) request.add_pools(std::string(16, 'x'));
  for (const bool over : {false, true}) {
    if (over) request.add_peers(std::string(16, 'y'));
    request.set_request(1 + (over ? 1 : 0));
    v1::AcquireResponse response;
    Completion completion;
    server::Acquire(context_, session, TimePoint::max(), request, &response, completion.done());
    EXPECT_EQ(absl::IsInvalidArgument(completion.status), over) << completion.status;
  }
}

// The process was requested to copy pages, and closes its pool while its session stays.
TEST_F(DeviceCallsTest, WhoLeavesCopiesNothing) {
  const auto session = OpenSession();
  const auto other = OpenSession();
  const std::string pool = Join(session);
  ASSERT_EQ(Join(other), pool);
  ASSERT_NO_FATAL_FAILURE(FillPool(other, pool));
  auto notices = std::make_shared<NoticeQueue>(8, [] {});
  ASSERT_TRUE(session->OpenNotices(notices));
  EXPECT_THAT(Reserve(*other, pool, 1), SizeIs(0));
  const auto notice = notices->Take();
  ASSERT_TRUE(notice.has_value());
  const size_t requested = std::get<NoticeQueue::Demotions>(*notice).work.size();
  ASSERT_GT(requested, 0u);
  const auto demoting = [&] {
    storage::StoreStats stats;
    tier_.AddStats(stats);
    return stats.pools.demoting_slots;
  };
  EXPECT_EQ(demoting(), requested);
  v1::PoolRequest leave;
  leave.mutable_leave()->set_pool(pool);
  ASSERT_EQ(Code(session, leave), 0u);
  EXPECT_EQ(demoting(), 0u);
  EXPECT_THAT(Reserve(*other, pool, static_cast<uint32_t>(requested)), SizeIs(requested));
}

TEST_F(DeviceCallsTest, DemotionsGoToAMemberWithAStream) {
  const auto session = OpenSession();
  const std::string pool = Join(session);
  ASSERT_NO_FATAL_FAILURE(FillPool(session, pool));
  int wakes = 0;
  auto notices = std::make_shared<NoticeQueue>(8, [&wakes] { ++wakes; });
  ASSERT_TRUE(session->OpenNotices(notices));
  EXPECT_THAT(Reserve(*session, pool, 1), SizeIs(0));
  EXPECT_EQ(wakes, 1);
  const auto notice = notices->Take();
  ASSERT_TRUE(notice.has_value());
  const auto& demotions = std::get<NoticeQueue::Demotions>(*notice);
  EXPECT_EQ(demotions.pool.view(), pool);
  ASSERT_FALSE(demotions.work.empty());
  // Its stream ends: no process copies, and the slots are free.
  session->CloseNotices();
  sessions_.NoteStreamEnd(*session);
  EXPECT_THAT(Reserve(*session, pool, 1), SizeIs(1));
}

}  // namespace
}  // namespace crumb::server
