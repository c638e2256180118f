// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "common/clock.h"
#include "common/mutex.h"
#include "common/thread.h"

namespace crumb::client {

// Background is one thread that runs tasks in the order in which they were added. Callers bound the
// number of their tasks. Thread-safe.
//
// A task runs without a lock held and may add tasks. Objects that tasks use must outlive the
// Background: place it behind them among an owner's members.
class Background {
 public:
  // `name` is the thread's name. The thread starts with the first task.
  explicit Background(std::string name) : name_(std::move(name)) {}
  Background(const Background&) = delete;
  Background& operator=(const Background&) = delete;
  // Runs all tasks added so far.
  ~Background();

  // Queues a task. Does not block; the queue has no bound of its own.
  void Add(std::function<void()> task);
  // Blocks until all tasks added before have run. kDeadlineExceeded: not within `timeout`.
  absl::Status WaitIdle(Duration timeout);

 private:
  void Run();

  const std::string name_;
  Mutex mutex_;
  CondVar changed_;
  std::deque<std::function<void()>> tasks_ ABSL_GUARDED_BY(mutex_);
  uint64_t added_ ABSL_GUARDED_BY(mutex_) = 0;
  uint64_t done_ ABSL_GUARDED_BY(mutex_) = 0;
  bool started_ ABSL_GUARDED_BY(mutex_) = false;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  Thread thread_;
};

}  // namespace crumb::client
