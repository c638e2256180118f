// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>

#include "common/clock.h"

namespace crumb {

// A clock that moves only by Advance. Thread-safe.
class FakeClock : public Clock {
 public:
  TimePoint Now() const override { return TimePoint(Duration(ticks_.load())); }
  void Advance(Duration by) { ticks_.fetch_add(by.count()); }

 private:
  std::atomic<Duration::rep> ticks_{0};
};

}  // namespace crumb
