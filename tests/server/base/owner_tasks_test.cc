// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "server/base/owner_tasks.h"

#include <atomic>
#include <vector>

#include "common/mutex.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/common/eventually.h"

namespace crumb::server {
namespace {

// Blocks tasks until it is opened.
class Gate {
 public:
  void Open() {
    MutexLock lock(&mutex_);
    open_ = true;
    changed_.NotifyAll();
  }
  void Pass() {
    MutexLock lock(&mutex_);
    while (!open_) changed_.Wait(&mutex_);
  }

 private:
  Mutex mutex_;
  CondVar changed_;
  bool open_ ABSL_GUARDED_BY(mutex_) = false;
};

TEST(OwnerTasksTest, TasksOfOneOwnerRunInOrder) {
  std::vector<int> order;
  {
    OwnerTasks tasks({.name = "test"});
    for (int i = 0; i < 100; ++i) {
      ASSERT_TRUE(tasks.Submit("one", [&order, i] { order.push_back(i); }));
    }
  }
  std::vector<int> expected(100);
  for (int i = 0; i < 100; ++i) expected[static_cast<size_t>(i)] = i;
  EXPECT_EQ(order, expected);
}

TEST(OwnerTasksTest, ABlockedOwnerDelaysNoOther) {
  Gate gate;
  OwnerTasks tasks({.name = "test"});
  std::atomic<int> blocked = 0;
  for (const char* owner : {"a", "b", "c"}) {
    ASSERT_TRUE(tasks.Submit(owner, [&] {
      gate.Pass();
      ++blocked;
    }));
  }
  std::atomic<int> ran = 0;
  for (int i = 0; i < 10; ++i) ASSERT_TRUE(tasks.Submit("honest", [&] { ++ran; }));
  EXPECT_TRUE(Eventually([&] { return ran == 10; }));
  EXPECT_EQ(blocked, 0);
  EXPECT_EQ(tasks.pending("a"), 1u);
  gate.Open();
  EXPECT_TRUE(Eventually([&] { return blocked == 3 && tasks.pending("a") == 0; }));
}

TEST(OwnerTasksTest, RefusesMoreThanItsBoundAndDestroysAnyway) {
  Gate gate;
  OwnerTasks tasks({.name = "test", .tasks_max = 2});
  ASSERT_TRUE(tasks.Submit("a", [&] { gate.Pass(); }));
  ASSERT_TRUE(tasks.Submit("a", [] {}));
  EXPECT_FALSE(tasks.Submit("a", [] {}));
  EXPECT_TRUE(tasks.Submit("b", [] {}));
  auto object = std::make_shared<int>(1);
  const std::weak_ptr<int> watched = object;
  tasks.Destroy("a", std::move(object));
  EXPECT_EQ(tasks.pending("a"), 3u);
  EXPECT_FALSE(watched.expired());
  gate.Open();
  EXPECT_TRUE(Eventually([&] { return watched.expired(); }));
}

TEST(OwnerTasksTest, DescriptorsAreCountedUntilTheirTaskHasEnded) {
  Gate gate;
  OwnerTasks tasks({.name = "test"});
  ASSERT_TRUE(tasks.Submit(
      "a", [&] { gate.Pass(); }, 3));
  tasks.Destroy("a", std::make_shared<int>(1), 200);
  tasks.SubmitAlways(
      "b", [&] { gate.Pass(); }, 7);
  EXPECT_EQ(tasks.descriptors("a"), 203u);
  EXPECT_EQ(tasks.descriptors("b"), 7u);
  EXPECT_EQ(tasks.descriptors("c"), 0u);
  EXPECT_EQ(tasks.descriptors(), 210u);
  gate.Open();
  EXPECT_TRUE(Eventually([&] { return tasks.descriptors() == 0; }));
  EXPECT_EQ(tasks.descriptors("a"), 0u);
}

// A task that never returns is left alone; tasks behind it do not run.
TEST(OwnerTasksTest, ItsEndDoesNotWaitForBlockedTasks) {
  auto gate = std::make_shared<Gate>();
  auto passed = std::make_shared<std::atomic<int>>(0);
  auto behind = std::make_shared<std::atomic<int>>(0);
  {
    OwnerTasks tasks({.name = "test", .stop_wait = std::chrono::milliseconds(10)});
    ASSERT_TRUE(tasks.Submit("a", [gate, passed] {
      gate->Pass();
      ++*passed;
    }));
    ASSERT_TRUE(tasks.Submit("a", [behind] { ++*behind; }));
  }
  gate->Open();
  EXPECT_TRUE(Eventually([&] { return *passed == 1 && behind.use_count() == 1; }));
  EXPECT_EQ(*behind, 0);
}

}  // namespace
}  // namespace crumb::server
