// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "server/session/session_table.h"

#include <atomic>
#include <future>
#include <memory>
#include <thread>

#include "gtest/gtest.h"
#include "tests/server/memory_store.h"

namespace crumb::server {
namespace {

SessionLimits Limits() {
  SessionLimits limits;
  limits.sessions_max = 3;
  limits.engines_max = 2;
  limits.staging_bytes_max = ByteSize{1 << 20};
  limits.staging_total_bytes_max = ByteSize{2 << 20};
  limits.lease_pages_max = 100;
  return limits;
}

class SessionTableTest : public testing::Test {
 protected:
  std::shared_ptr<Session> Open(uint64_t staging_bytes = 4096, const std::string& engine = "") {
    return table_.Open({"test", engine, 0, staging_bytes, ""}).value();
  }
  static std::string EngineOf(const Session& session) {
    return std::string(session.engine().id().view());
  }

  ServerMetrics metrics_{1};
  MemoryStore store_{8, 4096, {}};
  SessionTable table_{Limits(), store_, metrics_};
};

TEST_F(SessionTableTest, TokensFindTheirSessionOnly) {
  const auto a = Open();
  const auto b = Open();
  EXPECT_EQ(table_.Find(a->token().view()), a);
  EXPECT_EQ(table_.Find(b->token().view()), b);
  EXPECT_EQ(table_.Find(""), nullptr);
  EXPECT_EQ(table_.Find(std::string(16, 'x')), nullptr);
  RandomId half = a->token();  // the same place in the table, another secret
  half.bytes[15] ^= 1;
  EXPECT_EQ(table_.Find(half.view()), nullptr);
  table_.End(a);
  EXPECT_EQ(table_.Find(a->token().view()), nullptr);
}

// A session is in the table before its process is welcomed. Notices of slabs that are gone read all
// sessions meanwhile. ThreadSanitizer reports an unguarded read of the pointer.
TEST_F(SessionTableTest, SlabsAreReadWhileAProcessIsWelcomed) {
  constexpr int kSessions = 100;
  std::atomic<bool> stop{false};
  std::atomic<int> looks{0};
  std::thread notifier([&] {
    while (!stop.load()) {
      for (const auto& session : table_.List()) {
        const auto slabs = session->slabs();
        if (slabs != nullptr && !slabs->Forget(/*slab=*/0)) ++looks;
      }
    }
  });
  for (int i = 0; i < kSessions; ++i) {
    const auto session = Open();
    session->SetSlabs(std::make_shared<SlabGate>(/*socket=*/-1, /*slab_bytes=*/4096));
    const int before = looks.load();
    while (looks.load() == before) std::this_thread::yield();
    table_.End(session);
  }
  stop.store(true);
  notifier.join();
}

// Holds nothing. An Acquire that was under way ends while the table looks.
class LeasingMemory final : public SessionMemory {
 public:
  bool Holds(const Session& session) const override {
    Engine& engine = session.engine();
    const uint64_t taken = engine.TakeBudget(1);
    if (taken > 0) engine.AddLease(77, 1, taken, session.token());
    return false;
  }
  void CallsEnded(const Session&) override {}
  void ProcessEnded(const Session&) override {}
};

TEST_F(SessionTableTest, ALeaseThatComesWhileASessionIsSettledIsKept) {
  LeasingMemory memory;
  table_.SetMemory(&memory);
  const auto session = Open();
  table_.Disconnect(session);
  EXPECT_EQ(session->phase(), Session::Phase::kDisconnected);  // its process may read
  EXPECT_EQ(session->engine().leases(), 1u);
  table_.End(session);
  EXPECT_EQ(session->engine().leases(), 0u);
}

// Freeing the memory of a session takes time in its size; meanwhile other processes find their
// sessions.
TEST_F(SessionTableTest, WhatASessionLeavesIsFreedWithoutTheTablesLock) {
  const auto session = Open();
  std::thread other;
  std::promise<void> completed;
  bool in_time = false;
  ASSERT_EQ(session->engine().TakeBudget(1), 1u);
  std::shared_ptr<const void> held(this, [&](const void*) {
    other = std::thread([&] {
      table_.totals();
      session->engine().leases();
      completed.set_value();
    });
    in_time = completed.get_future().wait_for(std::chrono::seconds(5)) == std::future_status::ready;
  });
  ASSERT_TRUE(session->engine().AddLease(9, 1, 1, session->token(), std::move(held)));
  table_.End(session);
  ASSERT_TRUE(other.joinable()) << "the lease has ended";
  other.join();
  EXPECT_TRUE(in_time);
}

TEST_F(SessionTableTest, EverythingIsBounded) {
  const auto a = Open(1 << 20);
  const auto b = Open(1 << 20);
  EXPECT_EQ(table_.Open({"c", EngineOf(*a), 0, 4096, ""}).status().code(),
            absl::StatusCode::kResourceExhausted);  // staging
  EXPECT_EQ(table_.Open({"c", "", 0, 0, ""}).status().code(),
            absl::StatusCode::kResourceExhausted);  // engines
  const auto c = Open(0, EngineOf(*a));
  EXPECT_EQ(table_.Open({"d", EngineOf(*a), 0, 0, ""}).status().code(),
            absl::StatusCode::kResourceExhausted);  // sessions
  EXPECT_EQ(table_.totals().sessions, 3u);
  EXPECT_EQ(table_.totals().staging_bytes, uint64_t{2} << 20);
}

TEST_F(SessionTableTest, AWishForMoreStagingThanAllowedGetsLess) {
  EXPECT_EQ(Open(UINT64_MAX)->staging()->size(), uint64_t{1} << 20);
  EXPECT_EQ(Open(1)->staging()->size(), 4096u);
}

TEST_F(SessionTableTest, OnlyTheSameUserJoinsAnEngine) {
  const auto a = Open();
  EXPECT_EQ(table_.Open({"b", EngineOf(*a), 77, 0, ""}).status().code(),
            absl::StatusCode::kNotFound);
  EXPECT_EQ(table_.Open({"b", "short", 0, 0, ""}).status().code(),
            absl::StatusCode::kInvalidArgument);
  // Processes of an engine agree on its id; the first one makes the engine, in whatever order.
  const auto c = Open(0, std::string(16, 'e'));
  EXPECT_EQ(EngineOf(*c), std::string(16, 'e'));
  EXPECT_EQ(&Open(0, std::string(16, 'e'))->engine(), &c->engine());
}

TEST_F(SessionTableTest, LeasesEndWithTheEnginesLastSession) {
  const auto a = Open();
  const auto b = Open(0, EngineOf(*a));
  ASSERT_EQ(a->engine().TakeBudget(5), 5u);
  ASSERT_TRUE(a->engine().AddLease(7, 3, 5, a->token()));
  EXPECT_EQ(a->engine().pages(), 3u);
  ASSERT_TRUE(table_.Join(*b, 7));
  table_.End(a);
  EXPECT_EQ(b->engine().leases(), 1u) << "b has joined it";
  table_.End(b);
  EXPECT_EQ(metrics_.leases_reaped.value(), 1u);
  EXPECT_EQ(b->engine().leases(), 0u);
  EXPECT_EQ(b->engine().TakeBudget(1), 0u);
  EXPECT_EQ(table_.totals().engines, 0u);
  table_.End(b);
  EXPECT_EQ(metrics_.sessions_reaped.value(), 2u);
}

TEST_F(SessionTableTest, ALeaderThatCrashesAgainAndAgainLeavesNoLeases) {
  const auto follower = Open();
  for (uint64_t lease = 1; lease <= 100; ++lease) {
    const auto leader = Open(0, EngineOf(*follower));
    ASSERT_EQ(leader->engine().TakeBudget(5), 5u) << "after " << lease - 1 << " crashes";
    ASSERT_TRUE(leader->engine().AddLease(lease, 5, 5, leader->token()));
    if (lease == 50) {
      ASSERT_TRUE(table_.Join(*follower, lease));
    }
    table_.End(leader);
  }
  EXPECT_EQ(follower->engine().leases(), 1u) << "the one that the follower has joined";
  EXPECT_EQ(follower->engine().pages(), 5u);
  EXPECT_EQ(metrics_.leases_reaped.value(), 99u);
  EXPECT_TRUE(table_.Release(*follower, 50));
  EXPECT_EQ(follower->engine().pages(), 0u);
}

TEST_F(SessionTableTest, OneTenantTakesNeitherAllSessionsNorAllStagingMemory) {
  SessionLimits limits = Limits();
  limits.sessions_max = limits.engines_max = 4;
  limits.staging_total_bytes_max = ByteSize{4 << 20};
  SessionTable table(limits, store_, metrics_, /*part_max_percent=*/50);
  const auto open = [&](const std::string& tenant, uint64_t staging) {
    return table.Open({"test", "", 0, staging, tenant});
  };
  const auto first = open("a", 1 << 20);
  const auto second = open("a", 1 << 20);
  EXPECT_TRUE(absl::IsResourceExhausted(open("a", 0).status()));
  EXPECT_TRUE(open("b", 1 << 20).ok());
  table.End(*first);
  table.End(*second);
  EXPECT_EQ(table.totals().staging_bytes, uint64_t{1} << 20);
  EXPECT_TRUE(open("a", 1 << 20).ok());
}

TEST_F(SessionTableTest, AClosedConnectionWaitsForTheLeases) {
  int ended = 0;
  table_.OnEnded([&ended] { ++ended; });
  const auto a = Open();
  uint64_t offset = 0;
  ASSERT_TRUE(a->staging()->Reserve(100, offset));
  ASSERT_EQ(a->engine().TakeBudget(1), 1u);
  ASSERT_TRUE(a->engine().AddLease(9, 1, 1, a->token()));
  table_.Disconnect(a);
  EXPECT_EQ(a->phase(), Session::Phase::kDisconnected);
  EXPECT_EQ(a->staging(), nullptr);
  EXPECT_EQ(table_.totals().reservations, 0u);
  EXPECT_EQ(table_.totals().staging_bytes, 0u);
  EXPECT_EQ(a->engine().leases(), 1u);
  EXPECT_EQ(table_.Find(a->token().view()), a);  // to release
  EXPECT_TRUE(table_.Release(*a, 9));
  EXPECT_EQ(a->phase(), Session::Phase::kEnded);
  EXPECT_EQ(ended, 1);
  EXPECT_EQ(table_.totals().sessions, 0u);
}

TEST_F(SessionTableTest, AClosedConnectionWithoutLeasesEndsAtOnce) {
  const auto a = Open();
  table_.Disconnect(a);
  EXPECT_EQ(a->phase(), Session::Phase::kEnded);
  table_.Disconnect(a);
  table_.End(a);
  EXPECT_EQ(table_.totals().engines, 0u);
}

TEST_F(SessionTableTest, ADisconnectedProcessThatDiesEndsItsLeases) {
  const auto a = Open();
  ASSERT_EQ(a->engine().TakeBudget(1), 1u);
  ASSERT_TRUE(a->engine().AddLease(9, 1, 1, a->token()));
  table_.Disconnect(a);
  table_.End(a);
  EXPECT_EQ(metrics_.leases_reaped.value(), 1u);
  EXPECT_EQ(table_.totals().sessions, 0u);
  // Nothing of the old engine disturbs the next.
  const auto b = Open();
  table_.Disconnect(b);
  EXPECT_EQ(table_.totals().sessions, 0u);
}

TEST(RandomIdTest, MatchesByAllBytes) {
  const RandomId id = RandomId::Make().value();
  EXPECT_TRUE(id.Matches(id));
  for (size_t i = 0; i < id.bytes.size(); ++i) {
    RandomId other = id;
    other.bytes[i] ^= 0x80;
    EXPECT_FALSE(id.Matches(other));
  }
  EXPECT_FALSE(RandomId::Make().value().Matches(id));
}

}  // namespace
}  // namespace crumb::server
