// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "common/executor.h"

#include <gtest/gtest.h>

#include <atomic>

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

}  // namespace
}  // namespace crumb
