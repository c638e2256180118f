// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "storage/deadline_timer.h"

#include <algorithm>

namespace crumb::storage {
namespace {

// A clock that does not move by itself is looked at this often at most.
constexpr Duration kShortestSleep = std::chrono::milliseconds(1);

}  // namespace

DeadlineTimer::DeadlineTimer(const Clock& clock)
    : clock_(clock), thread_("crumb-deadline", [this] { Run(); }) {}

DeadlineTimer::~DeadlineTimer() {
  {
    MutexLock lock(&mutex_);
    stopping_ = true;
    wake_.NotifyAll();
  }
  thread_.Join();
}

DeadlineTimer::Id DeadlineTimer::Schedule(TimePoint deadline, std::function<void()> expired) {
  MutexLock lock(&mutex_);
  const Id id = {deadline, ++last_};
  deadlines_.emplace(id, std::move(expired));
  if (all_due_ || deadlines_.begin()->first == id) wake_.NotifyOne();
  return id;
}

void DeadlineTimer::ExpireAll() {
  MutexLock lock(&mutex_);
  all_due_ = true;
  wake_.NotifyOne();
}

void DeadlineTimer::Cancel(const Id& id) {
  MutexLock lock(&mutex_);
  deadlines_.erase(id);
}

void DeadlineTimer::Run() {
  while (true) {
    std::function<void()> expired;
    {
      MutexLock lock(&mutex_);
      while (!stopping_ && (deadlines_.empty() ||
                            (!all_due_ && deadlines_.begin()->first.first > clock_.Now()))) {
        if (deadlines_.empty()) {
          wake_.Wait(&mutex_);
        } else {
          const Duration left = deadlines_.begin()->first.first - clock_.Now();
          wake_.WaitUntil(&mutex_,
                          std::chrono::steady_clock::now() + std::max(left, kShortestSleep));
        }
      }
      if (stopping_) return;
      expired = std::move(deadlines_.begin()->second);
      deadlines_.erase(deadlines_.begin());
    }
    expired();
  }
}

}  // namespace crumb::storage
