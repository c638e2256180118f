// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "common/executor.h"

#include <gtest/gtest.h>

#include <atomic>
#include <future>

#include "tests/common/eventually.h"

namespace crumb {
namespace {

TEST(ExecutorTest, RunsEverythingBeforeItEnds) {
  std::atomic<int> ran{0};
  {
    Executor executor({.name = "test", .threads = 3, .queue_max = 1000});
    for (int i = 0; i < 500; ++i) ASSERT_TRUE(executor.Submit([&] { ++ran; }));
  }
  EXPECT_EQ(ran, 500);
}

TEST(ExecutorTest, RefusesOverItsBoundAndCounts) {
  Mutex mutex;
  CondVar changed;
  bool started = false;
  bool open = false;
  Executor executor({.name = "test", .threads = 1, .queue_max = 2});
  ASSERT_TRUE(executor.Submit([&] {
    MutexLock lock(&mutex);
    started = true;
    changed.NotifyAll();
    while (!open) changed.Wait(&mutex);
  }));
  {
    MutexLock lock(&mutex);
    while (!started) changed.Wait(&mutex);
  }
  EXPECT_TRUE(executor.Submit([] {}));
  EXPECT_TRUE(executor.Submit([] {}));
  EXPECT_FALSE(executor.Submit([] {}));
  EXPECT_EQ(executor.refused(), 1u);
  EXPECT_EQ(executor.queued(), 2u);
  {
    MutexLock lock(&mutex);
    open = true;
    changed.NotifyAll();
  }
  executor.Stop();
  EXPECT_EQ(executor.queued(), 0u);
  EXPECT_FALSE(executor.Submit([] {})) << "stopped";
}

// An executor with one thread, which waits until every task is queued; then notes the tasks' order.
class RotationTest : public testing::Test {
 protected:
  RotationTest() {
    executor_.Submit([this] {
      MutexLock lock(&mutex_);
      started_ = true;
      changed_.NotifyAll();
      while (!open_) changed_.Wait(&mutex_);
    });
    MutexLock lock(&mutex_);
    while (!started_) changed_.Wait(&mutex_);
  }
  ~RotationTest() override { Ran(); }  // the executor runs queued tasks before it ends
  bool Submit(const std::string& tenant) {
    return executor_.Submit(tenant, [this, tenant] { ran_ += tenant; });
  }
  std::string Ran() {
    {
      MutexLock lock(&mutex_);
      open_ = true;
      changed_.NotifyAll();
    }
    executor_.Stop();
    return ran_;
  }

  Mutex mutex_;
  CondVar changed_;
  bool started_ = false;
  bool open_ = false;
  std::string ran_;
  Executor executor_{{.name = "test", .threads = 1, .queue_max = 8, .part_max_percent = 50}};
};

TEST_F(RotationTest, ATenantHasOnlyItsPartOfThePlaces) {
  for (int i = 0; i < 4; ++i) EXPECT_TRUE(Submit("a"));
  EXPECT_FALSE(Submit("a"));
  EXPECT_TRUE(Submit("b"));
  EXPECT_EQ(executor_.refused(), 1u);
}

TEST_F(RotationTest, TenantsTakeTurnsWhateverTheyQueued) {
  for (const char* tenant : {"a", "a", "a", "b", "b", "c"}) ASSERT_TRUE(Submit(tenant));
  EXPECT_EQ(Ran(), "abcaba");
}

TEST_F(RotationTest, OtherTenantsRunBetweenTheStepsOfATask) {
  int left = 3;
  ASSERT_TRUE(executor_.SubmitSteps("a", [this, &left] {
    ran_ += "a";
    return --left > 0;
  }));
  ASSERT_TRUE(Submit("b"));
  ASSERT_TRUE(executor_.Submit("a", [this] { ran_ += "A"; }));
  ASSERT_TRUE(Submit("c"));
  EXPECT_EQ(Ran(), "abcaaA") << "a's own tasks stay in order";
}

TEST(ExecutorTest, OneTenantsTasksLeaveAThreadToOthers) {
  std::promise<void> release;
  const std::shared_future<void> released = release.get_future().share();
  std::atomic<int> running = 0;
  std::promise<void> others;
  std::future<void> others_ran = others.get_future();
  Executor executor({.name = "test", .threads = 3, .queue_max = 16, .part_max_percent = 50});
  for (int i = 0; i < 5; ++i) {
    ASSERT_TRUE(executor.Submit("a", [&running, released] {
      ++running;
      released.wait();
    }));
  }
  ASSERT_TRUE(executor.Submit("b", [&others] { others.set_value(); }));
  EXPECT_EQ(others_ran.wait_for(std::chrono::seconds(20)), std::future_status::ready);
  EXPECT_LE(running, 2);
  release.set_value();
  executor.Stop();
  EXPECT_EQ(running, 5) << "tasks that waited for a thread run, too";
}

TEST(ExecutorTest, ATenantThatIsAloneUsesAllThreadsButOne) {
  std::atomic<int> running = 0;
  Executor executor({.name = "test", .threads = 3, .queue_max = 16, .part_max_percent = 50});
  for (int i = 0; i < 2; ++i) {
    ASSERT_TRUE(executor.Submit("a", [&running] {
      ++running;
      EXPECT_TRUE(Eventually([&running] { return running == 2; }));
    }));
  }
}

}  // namespace
}  // namespace crumb
