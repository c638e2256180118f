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

// One thread that runs tasks in the order in which they came. Who adds a task bounds how many there
// are. Thread-safe.
class Background {
 public:
  // `name` of the thread, which starts with the first task.
  explicit Background(std::string name) : name_(std::move(name)) {}
  Background(const Background&) = delete;
  Background& operator=(const Background&) = delete;
  // Runs what was added.
  ~Background();

  void Add(std::function<void()> task);
  // Waits until what was added before is done. kDeadlineExceeded.
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
