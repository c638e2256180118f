// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <utility>

#include "common/clock.h"

namespace crumb::transport {

// What is to happen at a time. Not thread-safe: of the progress thread.
class Timers {
 public:
  using Id = std::pair<TimePoint, uint64_t>;

  // `act` may add and remove timers. TimePoint::max() is never.
  Id Add(TimePoint when, std::function<void()> act) {
    const Id id{when, ++last_};
    if (when != TimePoint::max()) timers_.emplace(id, std::move(act));
    return id;
  }
  // Does nothing when it has run.
  void Remove(const Id& id) { timers_.erase(id); }

  void Run(TimePoint now) {
    while (!timers_.empty() && timers_.begin()->first.first <= now) {
      const auto act = std::move(timers_.begin()->second);
      timers_.erase(timers_.begin());
      act();
    }
  }
  TimePoint Next() const {
    return timers_.empty() ? TimePoint::max() : timers_.begin()->first.first;
  }
  void Clear() { timers_.clear(); }

 private:
  std::map<Id, std::function<void()>> timers_;
  uint64_t last_ = 0;
};

}  // namespace crumb::transport
