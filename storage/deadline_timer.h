// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <utility>

#include "common/clock.h"
#include "common/mutex.h"
#include "common/thread.h"

namespace crumb::storage {

// Calls functions when their time has come, on a thread of its own that sleeps until the earliest.
// Thread-safe.
class DeadlineTimer {
 public:
  using Id = std::pair<TimePoint, uint64_t>;

  explicit DeadlineTimer(const Clock& clock);
  // Discards the calls that are not due yet.
  ~DeadlineTimer();

  // `expired` must not block.
  Id Schedule(TimePoint deadline, std::function<void()> expired);
  // Makes all calls due now, and later ones as soon as they are scheduled.
  void ExpireAll();
  // Has no effect if the call was made or is in progress.
  void Cancel(const Id& id);

 private:
  void Run();

  const Clock& clock_;
  Mutex mutex_;
  CondVar wake_;
  std::map<Id, std::function<void()>> deadlines_ ABSL_GUARDED_BY(mutex_);
  uint64_t last_ ABSL_GUARDED_BY(mutex_) = 0;
  bool all_due_ ABSL_GUARDED_BY(mutex_) = false;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  Thread thread_;
};

}  // namespace crumb::storage
