// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "server/cluster/breaker.h"

#include <gtest/gtest.h>

#include "server/cluster/view.h"
#include "tests/common/fake_clock.h"

namespace crumb::server {
namespace {

class BreakerTest : public testing::Test {
 protected:
  void Fail(int times) {
    for (int i = 0; i < times; ++i) {
      EXPECT_TRUE(breaker_.Allow());
      breaker_.Fail(Breaker::Of::kCalls);
    }
  }
  FakeClock clock_;
  Breaker breaker_{{.failures = 3, .open_for = std::chrono::seconds(2)}, clock_};
};

TEST_F(BreakerTest, OpensAfterFailuresInARowOnly) {
  Fail(2);
  breaker_.Succeed(Breaker::Of::kCalls);
  Fail(2);
  EXPECT_EQ(breaker_.state(), Breaker::State::kClosed);
  Fail(1);
  EXPECT_EQ(breaker_.state(), Breaker::State::kOpen);
  EXPECT_FALSE(breaker_.Allow());
  EXPECT_EQ(breaker_.opened(), 1u);
}

TEST_F(BreakerTest, LetsOneProbeThroughWhenItsTimeIsUp) {
  Fail(3);
  clock_.Advance(std::chrono::milliseconds(1999));
  EXPECT_FALSE(breaker_.Allow());
  clock_.Advance(std::chrono::milliseconds(1));
  EXPECT_TRUE(breaker_.Allow());
  EXPECT_FALSE(breaker_.Allow());
  breaker_.Fail(Breaker::Of::kCalls);
  EXPECT_FALSE(breaker_.Allow());
  clock_.Advance(std::chrono::seconds(2));
  EXPECT_TRUE(breaker_.Allow());
  breaker_.Succeed(Breaker::Of::kCalls);
  EXPECT_EQ(breaker_.state(), Breaker::State::kClosed);
  EXPECT_TRUE(breaker_.Allow());
}

TEST_F(BreakerTest, AProbeThatGetsNoResponseDoesNotKeepItOpenForEver) {
  Fail(3);
  clock_.Advance(std::chrono::seconds(2));
  EXPECT_TRUE(breaker_.Allow());
  clock_.Advance(std::chrono::seconds(2));
  EXPECT_TRUE(breaker_.Allow());
}

TEST_F(BreakerTest, OnlySilenceIsAFailure) {
  using absl::StatusCode;
  for (const auto code : {StatusCode::kUnavailable, StatusCode::kDeadlineExceeded}) {
    breaker_.Succeed(Breaker::Of::kCalls);
    for (int i = 0; i < 3; ++i) breaker_.Note(absl::Status(code, "silent"));
    EXPECT_EQ(breaker_.state(), Breaker::State::kOpen) << absl::StatusCodeToString(code);
  }
  for (const auto code : {StatusCode::kOk, StatusCode::kResourceExhausted, StatusCode::kNotFound,
                          StatusCode::kAborted, StatusCode::kPermissionDenied}) {
    breaker_.Note(absl::Status(code, "no connection error"));
    EXPECT_EQ(breaker_.state(), Breaker::State::kClosed) << absl::StatusCodeToString(code);
    for (int i = 0; i < 2; ++i) breaker_.Note(absl::UnavailableError("silent"));
  }
}

TEST_F(BreakerTest, ANodeThatRespondsAndDoesNotDeliverIsSilent) {
  using Of = Breaker::Of;
  const auto request = [&](bool delivers) {
    EXPECT_TRUE(breaker_.Allow());
    breaker_.Note(absl::OkStatus());
    delivers ? breaker_.Succeed(Of::kBytes) : breaker_.Fail(Of::kBytes);
  };
  for (const bool delivers : {false, false, true, false, false}) request(delivers);
  EXPECT_EQ(breaker_.state(), Breaker::State::kClosed);
  request(false);
  EXPECT_EQ(breaker_.state(), Breaker::State::kOpen);
  breaker_.Note(absl::OkStatus());  // a call that was in progress ends
  EXPECT_FALSE(breaker_.Allow());
  // The probe delivers nothing either.
  clock_.Advance(std::chrono::seconds(2));
  request(false);
  EXPECT_FALSE(breaker_.Allow());
  EXPECT_EQ(breaker_.opened(), 2u);
  clock_.Advance(std::chrono::seconds(2));
  request(true);
  request(false);
  EXPECT_TRUE(breaker_.Allow());
}

PlacementNode Node(const std::string& id, double weight = 1) {
  PlacementNode node;
  node.id = id;
  node.weight = weight;
  node.host = id;
  return node;
}

TEST(ViewHistoryTest, KeepsTheTwoNewest) {
  ViewHistory history;
  EXPECT_EQ(history.views().current->epoch, 0u);
  EXPECT_TRUE(history.Install(3, {Node("b"), Node("a")}));
  EXPECT_TRUE(history.Install(5, {Node("a"), Node("b"), Node("c")}));
  EXPECT_TRUE(history.Install(9, {Node("a"), Node("c")}));
  const ViewHistory::Views views = history.views();
  EXPECT_EQ(views.current->epoch, 9u);
  EXPECT_EQ(views.previous->epoch, 5u);
  EXPECT_EQ(views.previous->nodes.size(), 3u);
  EXPECT_EQ(views.current->nodes[0].id, "a");
  EXPECT_NE(views.current->nodes[0].digest, 0u);
}

TEST(ViewHistoryTest, TheSameNodesAreNoNewView) {
  ViewHistory history;
  EXPECT_TRUE(history.Install(1, {Node("a"), Node("b")}));
  EXPECT_FALSE(history.Install(2, {Node("b"), Node("a")}));
  EXPECT_EQ(history.views().current->epoch, 1u);
  EXPECT_TRUE(history.Install(3, {Node("a"), Node("b", 2)}));
}

TEST(ViewHistoryTest, AnOlderEpochDoesNotComeBack) {
  ViewHistory history;
  EXPECT_TRUE(history.Install(7, {Node("a")}));
  EXPECT_FALSE(history.Install(6, {Node("a"), Node("b")}));
  EXPECT_EQ(history.views().current->nodes.size(), 1u);
}

}  // namespace
}  // namespace crumb::server
