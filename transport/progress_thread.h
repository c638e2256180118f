// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <utility>
#include <vector>

#include "common/clock.h"
#include "common/mutex.h"

namespace crumb::transport {

// A queue of work that other threads post to a progress thread. Its length is bounded by its
// callers: fetches_max and serves_max bound the posts of fetches and replies. Thread-safe.
//
//     other threads:     Post(task)
//     progress thread:   Take() -> run the tasks -> ... -> if Sleep() is true, sleep -> Awake()
class Inbox {
 public:
  using Task = std::function<void()>;

  // `wake` ends the sleep of the progress thread; it is called only after Sleep returned true.
  explicit Inbox(std::function<void()> wake) : wake_(std::move(wake)) {}

  // Returns false after Close; the task is dropped then.
  bool Post(Task task) {
    MutexLock lock(&mutex_);
    if (closed_) return false;
    tasks_.push_back(std::move(task));
    waiting_.store(true, std::memory_order_release);
    if (asleep_) wake_();  // holds the lock, so that no call begins after Close has returned
    asleep_ = false;
    return true;
  }

  // The functions below are called by the progress thread only.
  // Removes and returns the tasks that wait, in the order of their posts. Costs one atomic read if
  // there are none.
  std::vector<Task> Take() {
    if (!waiting_.load(std::memory_order_acquire)) return {};
    MutexLock lock(&mutex_);
    waiting_.store(false, std::memory_order_release);
    return std::exchange(tasks_, {});
  }
  // Returns true if the queue is empty; a Post then calls `wake` until Awake. Returns false if a
  // task waits already.
  bool Sleep() {
    MutexLock lock(&mutex_);
    asleep_ = tasks_.empty();
    return asleep_;
  }
  // Ends the state that Sleep began: Posts call `wake` no more.
  void Awake() {
    MutexLock lock(&mutex_);
    asleep_ = false;
  }
  // Refuses all later Posts. Tasks that wait can still be taken.
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

// Actions that the progress thread takes at a time. Not thread-safe.
class Timers {
 public:
  using Id = std::pair<TimePoint, uint64_t>;

  // `act` may add and remove timers. TimePoint::max() means never.
  Id Add(TimePoint when, std::function<void()> act) {
    const Id id{when, ++last_};
    if (when != TimePoint::max()) timers_.emplace(id, std::move(act));
    return id;
  }
  // Does nothing if the timer has run.
  void Remove(const Id& id) { timers_.erase(id); }

  // Runs the timers that are due, in the order of their times.
  void Run(TimePoint now) {
    while (!timers_.empty() && timers_.begin()->first.first <= now) {
      const auto act = std::move(timers_.begin()->second);
      timers_.erase(timers_.begin());
      act();
    }
  }
  // Returns the time of the next timer; TimePoint::max(): there is none.
  TimePoint Next() const {
    return timers_.empty() ? TimePoint::max() : timers_.begin()->first.first;
  }
  // Drops all timers without running them.
  void Clear() { timers_.clear(); }

 private:
  std::map<Id, std::function<void()>> timers_;
  uint64_t last_ = 0;
};

// Adapts how long a thread polls before it sleeps. A sleep shorter than the longest poll means that
// polling would have found the event, so the time doubles. A longer sleep means that polling only
// wastes the thread's CPU time, for example because other processes use the cores, so the time is
// halved. Not thread-safe.
class PollTime {
 public:
  explicit PollTime(Duration most) : most_(most) {}

  // Returns how long to poll before the next sleep; 0 at first.
  Duration now() const { return now_; }

  // Notes how long the thread slept until an event woke it.
  void NoteSleep(Duration slept) {
    if (slept < most_) {
      now_ = std::min(most_, std::max<Duration>(kLeast, 2 * now_));
    } else {
      now_ = now_ < 2 * kLeast ? Duration::zero() : now_ / 2;
    }
  }

 private:
  // The shortest poll but 0: about the time that a sleep and a wake-up take.
  static constexpr Duration kLeast = std::chrono::microseconds(10);

  const Duration most_;
  Duration now_{};
};

}  // namespace crumb::transport
