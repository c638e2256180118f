// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <string>
#include <utility>

#include "common/clock.h"
#include "common/mutex.h"
#include "common/thread.h"

namespace crumb::server {

// Calls a function every interval on a thread of its own, for the first time one interval after
// construction. Calls never overlap, and calls that a suspended machine missed are not made up for.
// The destructor waits for a call that is running. Used for upkeep that no event triggers:
// certificates, the heap, idle keyspaces, the history of counters.
class PeriodicThread {
 public:
  // `name`: the thread's name, at most 15 characters. `interval`: above zero.
  PeriodicThread(const std::string& name, Duration interval, std::function<void()> body)
      : interval_(interval), body_(std::move(body)), thread_(name, [this] { Run(); }) {}
  PeriodicThread(const PeriodicThread&) = delete;
  PeriodicThread& operator=(const PeriodicThread&) = delete;
  ~PeriodicThread() {
    {
      MutexLock lock(&mutex_);
      stopping_ = true;
    }
    wake_.NotifyAll();
    thread_.Join();
  }

 private:
  // The thread. `body_` runs without the lock.
  void Run() {
    while (true) {
      {
        MutexLock lock(&mutex_);
        const TimePoint next = Clock::Real().Now() + interval_;
        while (!stopping_ && Clock::Real().Now() < next) wake_.WaitUntil(&mutex_, next);
        if (stopping_) return;
      }
      body_();
    }
  }

  const Duration interval_;
  const std::function<void()> body_;
  // Guards stopping_, and lets the destructor wake the thread.
  Mutex mutex_;
  CondVar wake_;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  Thread thread_;
};

}  // namespace crumb::server
