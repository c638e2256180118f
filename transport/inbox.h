// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <functional>
#include <utility>
#include <vector>

#include "common/mutex.h"

namespace crumb::transport {

// Work that other threads leave for a progress thread. What may be posted is bounded by those who
// post: fetches and serves have maxima. Thread-safe.
class Inbox {
 public:
  using Task = std::function<void()>;

  // `wake` ends the owner's sleep; it is called only after Sleep returned true.
  explicit Inbox(std::function<void()> wake) : wake_(std::move(wake)) {}

  // False, and the task is dropped, after Close.
  bool Post(Task task) {
    MutexLock lock(&mutex_);
    if (closed_) return false;
    tasks_.push_back(std::move(task));
    waiting_.store(true, std::memory_order_release);
    if (asleep_) wake_();  // under the lock: Close ends it
    asleep_ = false;
    return true;
  }

  // For the owner.
  std::vector<Task> Take() {
    if (!waiting_.load(std::memory_order_acquire)) return {};
    MutexLock lock(&mutex_);
    waiting_.store(false, std::memory_order_release);
    return std::exchange(tasks_, {});
  }
  // True: from now on a Post wakes. False: something waits already.
  bool Sleep() {
    MutexLock lock(&mutex_);
    asleep_ = tasks_.empty();
    return asleep_;
  }
  void Awake() {
    MutexLock lock(&mutex_);
    asleep_ = false;
  }
  void Close() {
    MutexLock lock(&mutex_);
    closed_ = true;
  }

 private:
  const std::function<void()> wake_;
  Mutex mutex_;
  std::vector<Task> tasks_ ABSL_GUARDED_BY(mutex_);
  bool asleep_ ABSL_GUARDED_BY(mutex_) = false;
  bool closed_ ABSL_GUARDED_BY(mutex_) = false;
  std::atomic<bool> waiting_{false};
};

}  // namespace crumb::transport
