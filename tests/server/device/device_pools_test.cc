// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "server/device/device_pools.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/socket.h>

#include <atomic>
#include <functional>
#include <future>
#include <thread>

#include "common/roster.h"
#include "gmock/gmock.h"
#include "tests/common/eventually.h"
#include "tests/common/temporary_folder.h"
#include "tests/server/device_calls_fixture.h"

namespace crumb::server {
namespace {

using testing::ElementsAre;
using testing::SizeIs;

// Slots of a process are not given out until it releases them or ends, though its connection broke.
TEST_F(DeviceCallsTest, ADisconnectedProcessKeepsItsSlots) {
  const auto session = OpenSession();
  const std::string pool = Join(session);
  const auto slots = Reserve(*session, pool, 3);
  sessions_.Disconnect(session);
  EXPECT_EQ(session->phase(), Session::Phase::kDisconnected);
  EXPECT_EQ(tier_.slots().HeldBy(1, session->token().slot()), 3u);
  v1::CommitResponse response;
  EXPECT_TRUE(absl::IsUnauthenticated(Commit(session, pool, slots[0], Header(0), &response)));
  EXPECT_TRUE(Release(*session, pool, {slots[0]}).ok());
  EXPECT_EQ(session->phase(), Session::Phase::kDisconnected);
  EXPECT_TRUE(Release(*session, pool, {slots[1], slots[2]}).ok());
  EXPECT_EQ(session->phase(), Session::Phase::kEnded);
  EXPECT_EQ(pools_.totals().idle_pools, 1u);
}

TEST_F(DeviceCallsTest, AnEndedProcessLeavesAnIdlePool) {
  const auto session = OpenSession();
  const std::string pool = Join(session);
  const auto slots = Reserve(*session, pool, 3);
  v1::PoolRequest reclaim;
  reclaim.mutable_reclaim()->set_device(device_);
  reclaim.mutable_reclaim()->set_bytes(1);
  const auto other = OpenSession();
  EXPECT_EQ(pools_.Handle(other, reclaim, {}).response.bytes(), 0u);
  sessions_.End(session);
  EXPECT_EQ(tier_.slots().HeldBy(1, session->token().slot()), 0u);
  EXPECT_EQ(pools_.totals().idle_pools, 1u);
  EXPECT_EQ(pools_.Handle(other, reclaim, {}).response.bytes(), kHandleBytes);
  EXPECT_EQ(pools_.totals().pools, 0u);
  EXPECT_EQ(pools_.totals().given_up, 1u);
}

TEST_F(DeviceCallsTest, BoundsPoolsAndHandles) {
  const auto session = OpenSession();
  v1::PoolRequest join = JoinRequest();
  for (int i = 0; i < 4; ++i) {
    join.mutable_join()->set_device(std::string(16, static_cast<char>('a' + i)));
    EXPECT_EQ(Code(session, join), 0u);
  }
  join.mutable_join()->set_device(std::string(16, 'z'));
  EXPECT_EQ(Code(session, join), kExhausted);
  join.mutable_join()->set_device("short");
  EXPECT_EQ(Code(session, join), kInvalid);
  const std::string pool = Join(session, false);  // 'd' is there
  v1::PoolRequest offer;
  offer.mutable_offer()->set_pool(pool);
  EXPECT_EQ(Code(session, offer), kInvalid);  // has no descriptor
  for (int i = 0; i < 8; ++i) EXPECT_EQ(Code(session, offer, OneFd()), 0u);
  EXPECT_EQ(Code(session, offer, OneFd()), kExhausted);
  EXPECT_EQ(metrics_.rejected[static_cast<size_t>(Rejection::kDevicePools)].value(), 1u);
  EXPECT_EQ(metrics_.rejected[static_cast<size_t>(Rejection::kDeviceHandles)].value(), 1u);
  EXPECT_EQ(Code(session, v1::PoolRequest()), kInvalid);
}

// The index has an entry for every slot: small slots in large handles would take all memory.
TEST_F(DeviceCallsTest, BoundsSlotsOfAllPools) {
  const auto session = OpenSession();
  v1::PoolRequest join = JoinRequest();
  join.mutable_join()->set_slot_bytes(128);
  join.mutable_join()->set_handle_bytes(uint64_t{1} << 62);
  EXPECT_EQ(Code(session, join), kInvalid);
  join.mutable_join()->set_handle_bytes(uint64_t{1} << 38);
  const PoolReply vast = pools_.Handle(session, join, {});
  ASSERT_EQ(vast.response.code(), 0u) << vast.response.error();
  v1::PoolRequest offer;
  offer.mutable_offer()->set_pool(vast.response.pool());
  EXPECT_EQ(Code(session, offer, OneFd()), kExhausted);
  EXPECT_EQ(metrics_.rejected[static_cast<size_t>(Rejection::kDeviceSlots)].value(), 1u);
  // Pools share the bound, which counts places: those before a handle count too.
  join.mutable_join()->set_slot_bytes(kHandleBytes / (kSlotsMax / 4));
  join.mutable_join()->set_handle_bytes(kHandleBytes);
  const UniqueFd roster = CreateRoster().value();
  join.mutable_join()->set_pool(std::string(16, 'q'));
  std::vector<UniqueFd> fds;
  fds.push_back(UniqueFd(::fcntl(roster.get(), F_DUPFD_CLOEXEC, 0)));
  ASSERT_EQ(Code(session, join, std::move(fds)), 0u);
  offer.mutable_offer()->set_pool(std::string(16, 'q'));
  offer.mutable_offer()->set_number(4);
  EXPECT_EQ(Code(session, offer, OneFd()), kExhausted);
  offer.mutable_offer()->set_number(2);
  EXPECT_EQ(Code(session, offer, OneFd()), 0u);
  offer.mutable_offer()->set_number(0);
  EXPECT_EQ(Code(session, offer, OneFd()), 0u);
  v1::PoolRequest third;
  third.mutable_offer()->set_pool(Join(session, false));
  EXPECT_EQ(Code(session, third, OneFd()), 0u);
  join.mutable_join()->clear_pool();
  join.mutable_join()->set_device(std::string(16, 'e'));
  const PoolReply fourth = pools_.Handle(session, join, {});
  ASSERT_EQ(fourth.response.code(), 0u) << fourth.response.error();
  offer.mutable_offer()->set_pool(fourth.response.pool());
  offer.mutable_offer()->clear_number();
  EXPECT_EQ(Code(session, offer, OneFd()), kExhausted);
}

TEST_F(DeviceCallsTest, APoolGrowsNoLargerThanItsWorkersWant) {
  const auto session = OpenSession();
  v1::PoolRequest offer;
  offer.mutable_offer()->set_pool(Join(session, false));
  offer.mutable_offer()->set_bytes_max(2 * kHandleBytes);
  EXPECT_EQ(Code(session, offer, OneFd()), 0u);
  EXPECT_EQ(Code(session, offer, OneFd()), 0u);
  EXPECT_EQ(Code(session, offer, OneFd()), kExhausted);
}

// Two workers had slots of a pool; until both are back, slots that neither claimed stay unused.
TEST_F(DeviceCallsTest, ARecoveredPoolWaitsForEverybodyInItsRoster) {
  const UniqueFd roster = CreateRoster().value();
  const auto ann_mark = RosterMark::Take(roster.get()).value();
  auto bob_mark = std::optional(RosterMark::Take(roster.get()).value());
  const std::string pool(16, 'p');
  const auto ann = OpenSession();
  v1::PoolRequest join = JoinRequest();
  join.mutable_join()->set_pool(pool);
  EXPECT_EQ(Code(ann, join), kInvalid);  // has no roster
  std::vector<UniqueFd> fds;
  fds.push_back(UniqueFd(::fcntl(roster.get(), F_DUPFD_CLOEXEC, 0)));
  ASSERT_EQ(Code(ann, join, std::move(fds)), 0u);
  v1::PoolRequest offer;
  offer.mutable_offer()->set_pool(pool);
  EXPECT_EQ(Code(ann, offer, OneFd()), static_cast<uint32_t>(absl::StatusCode::kUnavailable));
  offer.mutable_offer()->set_number(3);
  EXPECT_EQ(Code(ann, offer, OneFd()), 0u);
  EXPECT_EQ(Code(ann, offer, OneFd()), static_cast<uint32_t>(absl::StatusCode::kAlreadyExists));
  const uint64_t first = 3 * (kHandleBytes / slot_bytes());
  v1::ClaimSlotsRequest claim;
  claim.set_pool(pool);
  claim.set_keyspace(std::string(keyspace_->id.view()));
  claim.add_slots(first);
  claim.add_headers(Header(0));
  claim.add_slots(first + 1);
  claim.add_headers("");
  claim.add_slots(0);  // its handle does not exist
  claim.add_headers("");
  v1::ClaimSlotsResponse claimed;
  ASSERT_TRUE(ClaimSlots(context_, *ann, claim, &claimed).ok());
  EXPECT_THAT(claimed.claimed(), ElementsAre(true, true, false));
  join.mutable_join()->set_roster_mark(ann_mark.byte());
  ASSERT_EQ(Code(ann, join), 0u);
  EXPECT_THAT(Reserve(*ann, pool, 1), SizeIs(0));  // Bob may use any of them
  bob_mark.reset();                                // he is gone
  EXPECT_TRUE(Eventually([&] {
    pools_.Check();
    return Reserve(*ann, pool, 1).size() == 1;
  }));
  EXPECT_TRUE(absl::IsFailedPrecondition(ClaimSlots(context_, *ann, claim, &claimed)));
  EXPECT_TRUE(Release(*ann, pool, {first, first + 1}).ok());
}

// The response to a Reserve was lost with its connection: the process reports the slots it uses,
// and the rest is free, including slots reserved by a call that comes late.
TEST_F(DeviceCallsTest, ALostSessionKeepsWhatIsUsedOnly) {
  const auto session = OpenSession();
  const std::string pool = Join(session);
  const std::vector<uint64_t> used = Reserve(*session, pool, 3, 1);
  const std::vector<uint64_t> lost = Reserve(*session, pool, 4, 2);
  ASSERT_THAT(lost, SizeIs(4));
  EXPECT_EQ(tier_.slots().HeldBy(1, session->token().slot()), 7u);
  v1::ReleaseRequest release;
  release.set_pool(pool);
  release.set_all_but_slots(true);
  for (const uint64_t slot : {used[0], used[2], lost[0] + 1000}) release.add_slots(slot);
  ASSERT_TRUE(server::ReleaseSlots(context_, *session, release).ok());
  EXPECT_EQ(tier_.slots().HeldBy(1, session->token().slot()), 2u);
  EXPECT_THAT(Reserve(*session, pool, 4, 2), SizeIs(0));
  EXPECT_THAT(Reserve(*session, pool, 4, 3), SizeIs(0));
  EXPECT_EQ(tier_.slots().HeldBy(1, session->token().slot()), 2u);
  // The process's next session has the slots that were free; the former releases its slots when its
  // work is done.
  const auto next = OpenSession();
  Join(next, false);
  EXPECT_THAT(Reserve(*next, pool, 4, 1), SizeIs(4));
  EXPECT_TRUE(Release(*session, pool, {used[0], used[2]}).ok());
  EXPECT_EQ(tier_.slots().HeldBy(1, session->token().slot()), 0u);
  pools_.Check();
  EXPECT_FALSE(pools_.Joined(*session, pool).ok());
}

TEST_F(DeviceCallsTest, ARosterIsAMemoryFile) {
  const auto session = OpenSession();
  v1::PoolRequest join = JoinRequest();
  join.mutable_join()->set_pool(std::string(16, 'p'));
  std::vector<UniqueFd> fds;
  fds.push_back(UniqueFd(::open("/dev/null", O_RDWR | O_CLOEXEC)));
  EXPECT_NE(Code(session, join, std::move(fds)), 0u);
  EXPECT_EQ(pools_.totals().pools, 0u);
}

// A memory file that its holder has leased for reading: opening it for writing waits for the
// holder, or for 45 seconds.
std::vector<UniqueFd> LeasedRoster() {
  const UniqueFd roster = CreateRoster().value();
  std::vector<UniqueFd> fds;
  fds.emplace_back(
      ::open(("/proc/self/fd/" + std::to_string(roster.get())).c_str(), O_RDONLY | O_CLOEXEC));
  return fds;  // its file has no writer any more
}

TEST_F(DeviceCallsTest, ALeaseOnARosterHoldsUpNothing) {
  ASSERT_NE(::signal(SIGIO, SIG_IGN), SIG_ERR);  // the kernel notifies the holder with it
  const auto hostile = OpenSession();
  const auto honest = OpenSession();
  const std::string pool = Join(honest);
  v1::PoolRequest join = JoinRequest();
  join.mutable_join()->set_pool(std::string(16, 'p'));
  std::vector<UniqueFd> fds = LeasedRoster();
  const UniqueFd holder(::fcntl(fds.front().get(), F_DUPFD_CLOEXEC, 0));
  ASSERT_EQ(::fcntl(holder.get(), F_SETLEASE, F_RDLCK), 0);
  std::atomic<bool> completed = false;
  uint32_t code = 0;
  std::thread lookups_thread([&] {
    code = Code(hostile, join, std::move(fds));
    completed = true;
  });
  auto longest = Clock::Real().Now() - Clock::Real().Now();
  int lookups = 0;
  while (!completed || lookups < 1000) {
    const TimePoint before = Clock::Real().Now();
    EXPECT_EQ(pools_.AllOf("").size(), 1u);
    longest = std::max(longest, Clock::Real().Now() - before);
    ++lookups;
  }
  lookups_thread.join();
  EXPECT_EQ(code, static_cast<uint32_t>(absl::StatusCode::kUnavailable));
  EXPECT_LT(longest, std::chrono::seconds(15));
  EXPECT_EQ(pools_.totals().pools, 1u);
  // The roster is accepted after the lease has gone.
  ASSERT_EQ(::fcntl(holder.get(), F_SETLEASE, F_UNLCK), 0);
  fds.clear();
  fds.emplace_back(::fcntl(holder.get(), F_DUPFD_CLOEXEC, 0));
  EXPECT_EQ(Code(hostile, join, std::move(fds)), 0u);
}

TEST_F(DeviceCallsTest, HandlesAreDeviceMemory) {
  const auto session = OpenSession();
  v1::PoolRequest offer;
  offer.mutable_offer()->set_pool(Join(session, false));
  const TemporaryFolder folder;
  int pipe[2];
  ASSERT_EQ(::pipe2(pipe, O_CLOEXEC), 0);
  const UniqueFd reads(pipe[0]);
  std::vector<int> others = {
      ::open((folder.path() + "/file").c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600),
      ::open(folder.path().c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC),
      ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0),
      ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0),
      pipe[1],
  };
  const auto offered = [&](int fd) {
    std::vector<UniqueFd> fds;
    fds.emplace_back(fd);
    return Code(session, offer, std::move(fds));
  };
  for (const int fd : others) {
    ASSERT_GE(fd, 0);
    EXPECT_EQ(offered(fd), kInvalid);
  }
  EXPECT_EQ(offered(::open("/dev/null", O_RDWR | O_CLOEXEC)), 0u);  // a device
  EXPECT_EQ(Code(session, offer, OneFd()), 0u);
}

// Budgets of all pools and of a tenant's.
class PoolBudgetTest : public DeviceCallsTest {
 protected:
  DevicePools Make(const std::function<void(PoolOptions&)>& change) {
    PoolOptions options = Sizes();
    change(options);
    return DevicePools(options, &tier_, clock_, metrics_);
  }
  // The pool on the device of that letter; empty: refused.
  std::string JoinOn(DevicePools& pools, const std::shared_ptr<Session>& session, char device) {
    v1::PoolRequest join = JoinRequest();
    join.mutable_join()->set_device(std::string(16, device));
    const PoolReply reply = pools.Handle(session, join, {});
    EXPECT_THAT(reply.response.code(), testing::AnyOf(0u, kExhausted)) << reply.response.error();
    return reply.response.pool();
  }
  bool OfferTo(DevicePools& pools, const std::shared_ptr<Session>& session,
               const std::string& pool) {
    v1::PoolRequest offer;
    offer.mutable_offer()->set_pool(pool);
    const PoolReply reply = pools.Handle(session, offer, OneFd());
    EXPECT_THAT(reply.response.code(), testing::AnyOf(0u, kExhausted)) << reply.response.error();
    return reply.response.code() == 0;
  }
  static void Leave(DevicePools& pools, const std::shared_ptr<Session>& session,
                    const std::string& pool) {
    v1::PoolRequest leave;
    leave.mutable_leave()->set_pool(pool);
    EXPECT_EQ(pools.Handle(session, leave, {}).response.code(), 0u);
  }
  uint64_t ReclaimOn(DevicePools& pools, const std::shared_ptr<Session>& session, char device) {
    v1::PoolRequest reclaim;
    reclaim.mutable_reclaim()->set_device(std::string(16, device));
    reclaim.mutable_reclaim()->set_bytes(UINT64_MAX);
    return pools.Handle(session, reclaim, {}).response.bytes();
  }
};

TEST_F(PoolBudgetTest, OneTenantLeavesPoolsDescriptorsAndSlotsForOthers) {
  DevicePools pools = Make([](PoolOptions& options) { options.descriptors_max = 12; });
  const auto greedy = OpenSessionOf("greedy");
  const auto modest = OpenSessionOf("modest");
  const std::string first = JoinOn(pools, greedy, 'a');
  const std::string second = JoinOn(pools, greedy, 'b');
  EXPECT_EQ(JoinOn(pools, greedy, 'c'), "");
  EXPECT_EQ(Rejected(Rejection::kDeviceTenant), 1u);
  // Two rosters and four handles are half of the descriptors.
  for (int i = 0; i < 4; ++i) EXPECT_TRUE(OfferTo(pools, greedy, i % 2 == 0 ? first : second));
  EXPECT_FALSE(OfferTo(pools, greedy, first));
  EXPECT_EQ(Rejected(Rejection::kDeviceTenant), 2u);
  for (const char device : {'a', 'b'}) {
    const std::string pool = JoinOn(pools, modest, device);
    ASSERT_NE(pool, "");
    EXPECT_TRUE(OfferTo(pools, modest, pool));
    EXPECT_TRUE(OfferTo(pools, modest, pool));
  }
  EXPECT_EQ(pools.totals().descriptors, 12u);
  EXPECT_EQ(pools.totals().descriptors_max, 12u);
}

TEST_F(PoolBudgetTest, OneTenantLeavesSlotsForOthers) {
  DevicePools pools = Make([&](PoolOptions& options) {
    options.slots_max = static_cast<int64_t>(4 * (kHandleBytes / slot_bytes()));
  });
  const auto greedy = OpenSessionOf("greedy");
  const auto modest = OpenSessionOf("modest");
  const std::string pool = JoinOn(pools, greedy, 'a');
  EXPECT_TRUE(OfferTo(pools, greedy, pool));
  EXPECT_TRUE(OfferTo(pools, greedy, pool));
  EXPECT_FALSE(OfferTo(pools, greedy, pool));
  EXPECT_EQ(Rejected(Rejection::kDeviceTenant), 1u);
  EXPECT_TRUE(OfferTo(pools, modest, JoinOn(pools, modest, 'a')));
  EXPECT_TRUE(OfferTo(pools, modest, JoinOn(pools, modest, 'a')));
}

TEST_F(PoolBudgetTest, DescriptorsOfAllPoolsAreBoundedAndComeBack) {
  DevicePools pools = Make([](PoolOptions& options) { options.descriptors_max = 5; });
  const auto session = OpenSession();
  const std::string idle = JoinOn(pools, session, 'a');
  EXPECT_TRUE(OfferTo(pools, session, idle));
  const std::string used = JoinOn(pools, session, 'b');
  EXPECT_TRUE(OfferTo(pools, session, used));
  EXPECT_TRUE(OfferTo(pools, session, used));
  EXPECT_FALSE(OfferTo(pools, session, used));
  EXPECT_EQ(Rejected(Rejection::kDeviceHandles), 1u);
  EXPECT_EQ(pools.totals().pools, 2u);
  // The pool that no process takes part in gives its descriptors to one that is used.
  Leave(pools, session, idle);
  EXPECT_TRUE(OfferTo(pools, session, used));
  EXPECT_EQ(pools.totals().pools, 1u);
  EXPECT_EQ(pools.totals().descriptors, 4u);
  EXPECT_TRUE(OfferTo(pools, session, used));
  EXPECT_FALSE(OfferTo(pools, session, used));
  // Nor is a pool in the way of another.
  Leave(pools, session, used);
  EXPECT_NE(JoinOn(pools, session, 'c'), "");
  EXPECT_EQ(pools.totals().descriptors, 1u);
}

// The amounts of an ending pool count until its descriptors are closed: a tenant whose pools take
// long to end has no more than its part. Here the announcement that its page is gone takes long.
TEST_F(PoolBudgetTest, WhatAnEndingPoolTookCountsUntilItHasEnded) {
  std::promise<void> gate;
  const std::shared_future<void> opened = gate.get_future().share();
  storage::DeviceTier tier(
      {.device = {}, .is_below = [](const auto&) { return true; }}, Clock::Real(),
      {.added = {}, .removed = [&](const auto&, const auto&) { opened.wait(); }});
  PoolOptions options = Sizes();
  options.descriptors_max = 4;
  options.tenant_percent = 100;
  DevicePools pools(options, &tier, clock_, metrics_);
  const auto session = OpenSession();
  const std::string first = JoinOn(pools, session, 'a');
  ASSERT_TRUE(OfferTo(pools, session, first));
  const storage::DevicePoolNumber number = pools.Joined(*session, first).value();
  const std::vector<uint64_t> slots = pools.Reserve(*session, number, 0, 1).value();
  ASSERT_EQ(slots.size(), 1u);
  const std::string header = Header(1);
  const auto parsed = std::make_shared<const FragmentHeader>(
      DecodeFragmentHeader(std::as_bytes(std::span(header))).value());
  ASSERT_TRUE(tier.slots().Commit(number, session->token().slot(), slots[0], parsed, 1).ok());
  tier.slots().Release(number, session->token().slot(), slots);
  Leave(pools, session, first);
  EXPECT_EQ(ReclaimOn(pools, session, 'a'), kHandleBytes);
  EXPECT_EQ(pools.totals().pools, 0u);
  EXPECT_EQ(pools.totals().descriptors, 2u);
  const std::string second = JoinOn(pools, session, 'b');
  EXPECT_TRUE(OfferTo(pools, session, second));
  v1::PoolRequest offer;
  offer.mutable_offer()->set_pool(second);
  EXPECT_EQ(pools.Handle(session, offer, OneFd()).response.code(),
            static_cast<uint32_t>(absl::StatusCode::kUnavailable));
  EXPECT_EQ(Rejected(Rejection::kDeviceHandles), 1u);
  gate.set_value();
  EXPECT_TRUE(OfferTo(pools, session, second));
  EXPECT_EQ(pools.totals().descriptors, 3u);
}

TEST_F(PoolBudgetTest, HalfOfTheOpenFilesAreTheDefault) {
  rlimit limit{};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &limit), 0);
  DevicePools pools = Make([](PoolOptions&) {});
  EXPECT_EQ(pools.totals().descriptors_max, std::min<uint64_t>(limit.rlim_cur / 2, 50'000'000));
}

// A worker that is started again finds its pages, whatever other tenants say they need.
TEST_F(PoolBudgetTest, AnIdlePoolIsItsTenantsForAWhile) {
  DevicePools pools = Make([](PoolOptions& options) {
    options.pools_max = 2;
    options.keep_from_others = std::chrono::seconds(30);
  });
  const auto owner = OpenSessionOf("owner");
  const auto other = OpenSessionOf("other");
  const auto third = OpenSessionOf("third");
  const std::string pool = JoinOn(pools, owner, 'a');
  EXPECT_TRUE(OfferTo(pools, owner, pool));
  Leave(pools, owner, pool);
  EXPECT_EQ(ReclaimOn(pools, other, 'a'), 0u);
  EXPECT_NE(JoinOn(pools, other, 'b'), "");
  EXPECT_EQ(JoinOn(pools, third, 'a'), "");
  EXPECT_EQ(Rejected(Rejection::kDevicePools), 1u);
  clock_.Advance(std::chrono::seconds(29));
  EXPECT_EQ(ReclaimOn(pools, other, 'a'), 0u);
  EXPECT_EQ(JoinOn(pools, owner, 'a'), pool);  // it has its pages still
  Leave(pools, owner, pool);
  clock_.Advance(std::chrono::seconds(30));
  EXPECT_EQ(ReclaimOn(pools, other, 'b'), 0u);  // used
  EXPECT_EQ(ReclaimOn(pools, other, 'a'), kHandleBytes);
  const std::string again = JoinOn(pools, owner, 'a');
  EXPECT_NE(again, pool);
  Leave(pools, owner, again);
  EXPECT_EQ(ReclaimOn(pools, owner, 'a'), 0u);  // it was empty, and its own: given up at once
  EXPECT_EQ(pools.totals().pools, 1u);
}

// No PoolRequest reaches a pool of another tenant.
TEST_F(PoolBudgetTest, RequestsReachPoolsOfTheirTenantOnly) {
  const auto owner = OpenSessionOf("owner");
  const auto other = OpenSessionOf("other");
  const std::string pool = Join(owner);
  v1::PoolRequest join = JoinRequest();
  join.mutable_join()->set_pool(pool);
  EXPECT_EQ(Code(other, join, OneFd()), kInvalid);
  v1::PoolRequest offer;
  offer.mutable_offer()->set_pool(pool);
  EXPECT_EQ(Code(other, offer, OneFd()), kInvalid);
  v1::PoolRequest fetch;
  fetch.mutable_fetch()->set_pool(pool);
  EXPECT_EQ(Code(other, fetch), kInvalid);
  v1::PoolRequest leave;
  leave.mutable_leave()->set_pool(pool);
  EXPECT_EQ(Code(other, leave), kInvalid);
  EXPECT_TRUE(pools_.Joined(*owner, pool).ok());
  EXPECT_EQ(pools_.AllOf("owner").size(), 1u);
  EXPECT_THAT(pools_.AllOf("other"), testing::IsEmpty());
  EXPECT_THAT(pools_.OfEngine(other->engine()), testing::IsEmpty());
  EXPECT_THAT(pools_.OfEngine(owner->engine()), SizeIs(1));
}

TEST_F(DeviceCallsTest, WithoutATierEveryRequestIsRefused) {
  DevicePools none({}, nullptr, Clock::Real(), metrics_);
  const auto session = OpenSession();
  EXPECT_FALSE(none.enabled());
  EXPECT_EQ(none.Handle(session, JoinRequest(), {}).response.code(),
            static_cast<uint32_t>(absl::StatusCode::kFailedPrecondition));
  context_.pools = &none;
  v1::ReserveRequest request;
  request.set_pool(std::string(16, 'p'));
  request.set_count(1);
  v1::ReserveResponse response;
  EXPECT_TRUE(absl::IsFailedPrecondition(server::Reserve(context_, *session, request, &response)));
}

}  // namespace
}  // namespace crumb::server
