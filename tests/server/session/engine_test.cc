// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "server/session/engine.h"

#include <memory>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace crumb::server {
namespace {

using Hold = Engine::Hold;
using Removal = Engine::Removal;
using testing::ElementsAre;
using testing::UnorderedElementsAre;

RandomId Id(uint8_t number) {
  RandomId id;
  id.bytes[0] = number;
  return id;
}

class EngineTest : public testing::Test {
 protected:
  static constexpr uint64_t kPagesMax = 100;

  // Returns false if the engine has ended.
  bool Acquire(storage::LeaseId lease, uint64_t pages, const RandomId& session) {
    EXPECT_EQ(engine_.TakeBudget(pages), pages);
    return engine_.AddLease(lease, pages, pages, session);
  }
  Removal Remove(storage::LeaseId lease, Hold hold, const RandomId& session) {
    std::shared_ptr<const void> left;
    return engine_.RemoveLease(lease, hold, session, &left);
  }

  const RandomId leader_ = Id(1), follower_ = Id(2);
  Engine engine_{Id(9), 0, "tenant", kPagesMax, /*leases_max=*/3};
};

TEST_F(EngineTest, TheBudgetKeepsTheLeasedPagesOnly) {
  EXPECT_EQ(engine_.TakeBudget(60), 60u);
  EXPECT_EQ(engine_.TakeBudget(60), 40u) << "what is left";
  EXPECT_EQ(engine_.TakeBudget(1), 0u);
  EXPECT_TRUE(engine_.AddLease(1, 10, 60, leader_));
  EXPECT_EQ(engine_.pages(), 50u);
  EXPECT_TRUE(engine_.AddLease(0, 0, 40, leader_)) << "nothing was leased";
  EXPECT_EQ(engine_.pages(), 10u);
  EXPECT_EQ(engine_.leases(), 1u);
  EXPECT_EQ(Remove(1, Hold::kAcquired, leader_), Removal::kLast);
  EXPECT_EQ(engine_.pages(), 0u);
  EXPECT_EQ(engine_.TakeBudget(kPagesMax + 1), kPagesMax);
}

TEST_F(EngineTest, AcquiresInProgressCountAsLeases) {
  EXPECT_TRUE(Acquire(1, 1, leader_));
  EXPECT_EQ(engine_.TakeBudget(1), 1u);
  EXPECT_EQ(engine_.TakeBudget(1), 1u);
  EXPECT_EQ(engine_.TakeBudget(1), 0u) << "one lease and two Acquires in progress";
  EXPECT_TRUE(engine_.AddLease(0, 0, 1, leader_));
  EXPECT_EQ(engine_.TakeBudget(1), 1u);
}

TEST_F(EngineTest, ALeaseLastsUntilEveryHoldIsGivenBack) {
  EXPECT_FALSE(engine_.JoinLease(1));
  EXPECT_TRUE(Acquire(1, 5, leader_));
  EXPECT_TRUE(engine_.JoinLease(1));
  EXPECT_TRUE(engine_.JoinLease(1)) << "once for each call";
  EXPECT_EQ(Remove(1, Hold::kAcquired, leader_), Removal::kHeldByOthers);
  EXPECT_EQ(Remove(1, Hold::kAcquired, leader_), Removal::kUnknown);
  EXPECT_EQ(Remove(1, Hold::kJoined, follower_), Removal::kHeldByOthers);
  EXPECT_EQ(engine_.pages(), 5u);
  EXPECT_EQ(Remove(1, Hold::kJoined, follower_), Removal::kLast);
  EXPECT_EQ(engine_.pages(), 0u);
  EXPECT_EQ(Remove(1, Hold::kJoined, follower_), Removal::kUnknown);
}

TEST_F(EngineTest, AnySessionGivesTheAcquirersHoldBackButNoneThatHasLeft) {
  EXPECT_TRUE(Acquire(1, 1, leader_));
  EXPECT_TRUE(engine_.JoinLease(1));
  EXPECT_EQ(Remove(1, Hold::kJoined, follower_), Removal::kHeldByOthers);
  EXPECT_EQ(Remove(1, Hold::kAcquired, follower_), Removal::kUnknown);
  EXPECT_EQ(Remove(1, Hold::kAcquired, Id(3)), Removal::kLast);
}

TEST_F(EngineTest, TheAcquirerMayJoinItsOwnLeaseAndLeaveBoth) {
  EXPECT_TRUE(Acquire(1, 1, leader_));
  EXPECT_TRUE(engine_.JoinLease(1));
  EXPECT_EQ(Remove(1, Hold::kJoined, leader_), Removal::kHeldByOthers);
  EXPECT_EQ(Remove(1, Hold::kAcquired, leader_), Removal::kLast);
}

TEST_F(EngineTest, WhatIsKeptWithALeaseGoesToWhoEndsIt) {
  auto kept = std::make_shared<int>(1);
  const std::weak_ptr<int> watched = kept;
  EXPECT_EQ(engine_.TakeBudget(1), 1u);
  EXPECT_TRUE(engine_.AddLease(1, 1, 1, leader_, std::move(kept)));
  EXPECT_TRUE(engine_.JoinLease(1));
  std::shared_ptr<const void> left;
  EXPECT_EQ(engine_.RemoveLease(1, Hold::kAcquired, leader_, &left), Removal::kHeldByOthers);
  EXPECT_EQ(left, nullptr);
  EXPECT_EQ(engine_.RemoveLease(1, Hold::kJoined, follower_, &left), Removal::kLast);
  EXPECT_FALSE(watched.expired());
  left.reset();
  EXPECT_TRUE(watched.expired());
}

TEST_F(EngineTest, AProcessThatIsGoneLeavesTheLeasesThatOthersJoined) {
  EXPECT_TRUE(Acquire(1, 10, leader_));
  EXPECT_TRUE(Acquire(2, 20, leader_));
  EXPECT_TRUE(Acquire(3, 30, follower_));
  EXPECT_TRUE(engine_.JoinLease(2));
  Engine::Ended ended;
  engine_.DropAcquiredBy(leader_, &ended);
  EXPECT_THAT(ended.leases, ElementsAre(1u));
  EXPECT_EQ(ended.held.size(), 1u);
  EXPECT_EQ(engine_.pages(), 50u);
  EXPECT_EQ(Remove(2, Hold::kAcquired, leader_), Removal::kUnknown);
  EXPECT_EQ(Remove(2, Hold::kJoined, follower_), Removal::kLast);
  EXPECT_EQ(engine_.pages(), 30u);
}

TEST_F(EngineTest, AnEndedEngineTakesNoLease) {
  EXPECT_TRUE(Acquire(1, 10, leader_));
  EXPECT_TRUE(Acquire(2, 10, follower_));
  EXPECT_TRUE(engine_.JoinLease(2));
  EXPECT_EQ(engine_.TakeBudget(5), 5u);  // an Acquire is in progress
  Engine::Ended ended;
  engine_.End(&ended);
  EXPECT_THAT(ended.leases, UnorderedElementsAre(1u, 2u));
  EXPECT_FALSE(engine_.AddLease(3, 5, 5, leader_)) << "the caller ends it in the store";
  EXPECT_EQ(engine_.TakeBudget(1), 0u);
  EXPECT_FALSE(engine_.JoinLease(1));
  EXPECT_EQ(engine_.pages(), 0u);
  EXPECT_EQ(engine_.leases(), 0u);
}

}  // namespace
}  // namespace crumb::server
