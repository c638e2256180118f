// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <deque>
#include <functional>
#include <string>
#include <vector>

#include "common/metrics.h"
#include "common/mutex.h"
#include "common/thread.h"

namespace crumb {

// A few named threads behind one bounded queue. Idle threads sleep. Thread-safe.
class Executor {
 public:
  struct Options {
    std::string name = "executor";
    int threads = 1;
    size_t queue_max = 1024;  // tasks waiting; more are refused
  };

  explicit Executor(const Options& options);
  // Runs what is queued, then joins.
  ~Executor();

  // Queues `task`. Returns false, and counts it, when the queue is full or Stop was called.
  bool Submit(std::function<void()> task);

  // Refuses new tasks, runs what is queued, joins. Idempotent.
  void Stop();

  size_t queued() const;
  uint64_t refused() const { return refused_.value(); }

 private:
  void Run();

  const Options options_;
  mutable Mutex mutex_;
  CondVar wake_;
  std::deque<std::function<void()>> tasks_ ABSL_GUARDED_BY(mutex_);
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  Counter refused_;
  std::vector<Thread> threads_;
};

}  // namespace crumb
