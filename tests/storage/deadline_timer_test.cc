// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "storage/deadline_timer.h"

#include <future>

#include "gtest/gtest.h"
#include "tests/common/fake_clock.h"

namespace crumb::storage {
namespace {

TEST(DeadlineTimer, CallsInOrderOfTime) {
  DeadlineTimer timer(Clock::Real());
  const TimePoint now = Clock::Real().Now();
  std::promise<void> last;
  std::vector<int> order;
  timer.Schedule(now + std::chrono::milliseconds(20), [&] {
    order.push_back(2);
    last.set_value();
  });
  timer.Schedule(now + std::chrono::milliseconds(5), [&] { order.push_back(1); });
  last.get_future().wait();
  EXPECT_EQ(order, (std::vector<int>{1, 2}));
  EXPECT_GE(Clock::Real().Now(), now + std::chrono::milliseconds(20));
}

TEST(DeadlineTimer, ForgetsWhatIsCancelled) {
  DeadlineTimer timer(Clock::Real());
  const TimePoint now = Clock::Real().Now();
  bool called = false;
  std::promise<void> later;
  const auto id = timer.Schedule(now + std::chrono::milliseconds(10), [&] { called = true; });
  timer.Schedule(now + std::chrono::milliseconds(20), [&] { later.set_value(); });
  timer.Cancel(id);
  later.get_future().wait();
  EXPECT_FALSE(called);
}

TEST(DeadlineTimer, FollowsItsClock) {
  FakeClock clock;
  DeadlineTimer timer(clock);
  std::promise<void> done;
  auto future = done.get_future();
  timer.Schedule(clock.Now() + std::chrono::milliseconds(50), [&] { done.set_value(); });
  EXPECT_EQ(future.wait_for(std::chrono::milliseconds(80)), std::future_status::timeout);
  clock.Advance(std::chrono::milliseconds(50));
  future.wait();
}

TEST(DeadlineTimer, EverythingIsDueFromSomeTimeOn) {
  FakeClock clock;
  DeadlineTimer timer(clock);
  std::promise<void> before;
  std::promise<void> after;
  timer.Schedule(clock.Now() + std::chrono::hours(1), [&] { before.set_value(); });
  timer.ExpireAll();
  before.get_future().wait();
  timer.Schedule(clock.Now() + std::chrono::hours(2), [&] { after.set_value(); });
  after.get_future().wait();
}

}  // namespace
}  // namespace crumb::storage
