// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <functional>
#include <string>
#include <vector>

#include "common/mutex.h"
#include "common/thread.h"

namespace crumb::models {

// A fixed number of named threads that execute loops in parallel. Idle threads sleep. Thread-safe:
// loops of different callers run one after the other.
class ThreadPool {
 public:
  // `threads` includes the calling thread, so 1 starts none. 0 and below mean one per CPU on which
  // this process may run. At most 256.
  explicit ThreadPool(int threads, const std::string& name = "crumb-compute");
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;
  ~ThreadPool();

  // Returns the number of threads that run a loop, the caller's included.
  int threads() const { return static_cast<int>(workers_.size()) + 1; }

  // Runs body(0) to body(count - 1), each once, on the pool's threads and the calling thread, and
  // returns when all have returned. REQUIRES: `body` does not call ParallelFor.
  void ParallelFor(int count, const std::function<void(int)>& body);

 private:
  // The workers' thread: waits for a loop, takes part in it, and waits for the next one.
  void Work();
  // Runs indices of the current loop until none is left. Threads take them one by one.
  void RunLoop(const std::function<void(int)>& body, int count);

  Mutex callers_;  // held for the length of a loop

  Mutex mutex_;
  CondVar wake_;
  CondVar done_;
  const std::function<void(int)>* body_ ABSL_GUARDED_BY(mutex_) = nullptr;
  int count_ ABSL_GUARDED_BY(mutex_) = 0;
  int busy_ ABSL_GUARDED_BY(mutex_) = 0;      // workers inside the current loop
  int64_t loop_ ABSL_GUARDED_BY(mutex_) = 0;  // number of the current loop
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::atomic<int> next_{0};  // first index of the current loop that no thread has taken

  std::vector<Thread> workers_;
};

}  // namespace crumb::models
