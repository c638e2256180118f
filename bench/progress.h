// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <string>

#include "common/mutex.h"

namespace crumb::bench {

// Says on standard error how much of a long run is done and how long the rest will take: a line
// that rewrites itself on a terminal, one every 30 s elsewhere. Thread-safe.
class Progress {
 public:
  // `total` units of like work. Says nothing when `quiet`.
  Progress(std::string what, int total, bool quiet);
  ~Progress();

  void Add();

 private:
  using Clock = std::chrono::steady_clock;

  const std::string what_;
  const int total_;
  const bool quiet_;
  const bool terminal_;
  const Clock::time_point begin_ = Clock::now();
  Mutex mutex_;
  int done_ ABSL_GUARDED_BY(mutex_) = 0;
  Clock::time_point said_ ABSL_GUARDED_BY(mutex_) = begin_;
};

}  // namespace crumb::bench
