// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <chrono>

#include "common/clock.h"

namespace crumb::transport {

// How long a thread looks for more before it sleeps: longer while its sleeps turn out so short that
// looking would have found what ended them, shorter when they do not, as where other processes have
// the cores and looking only takes from what the thread is given. Not thread-safe.
class PollTime {
 public:
  explicit PollTime(Duration most) : most_(most) {}

  Duration now() const { return now_; }

  void NoteSleep(Duration slept) {
    if (slept < most_) {
      now_ = std::min(most_, std::max<Duration>(kLeast, 2 * now_));
    } else {
      now_ = now_ < 2 * kLeast ? Duration::zero() : now_ / 2;
    }
  }

 private:
  static constexpr Duration kLeast = std::chrono::microseconds(10);

  const Duration most_;
  Duration now_{};
};

}  // namespace crumb::transport
