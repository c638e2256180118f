// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>
#include <random>
#include <vector>

#include "common/clock.h"

namespace crumb {

using Frame = std::vector<std::byte>;

// One direction of a link that holds every frame back for a while and loses some, without
// reordering. Which ones follows from the seed and the frames' order alone. Not thread-safe.
class SlowLink {
 public:
  struct Counts {
    uint64_t passed = 0;  // taken out
    uint64_t lost = 0;
    uint64_t overflowed = 0;
  };

  // Over `frames_max` frames that are held back, more are dropped, as a router's queue does.
  SlowLink(uint64_t seed, size_t frames_max) : random_(seed), frames_max_(frames_max) {}

  // Both hold for frames from now on. `loss` is the share, from 0 to 1.
  void SetDelay(Duration delay) { delay_ = delay; }
  void SetLoss(double loss) { loss_ = loss; }

  void Offer(Frame frame, TimePoint now);
  // When the next frame is due; none: nothing is held back.
  std::optional<TimePoint> next_due() const;
  // The next frame that is due at `now`.
  std::optional<Frame> Take(TimePoint now);

  const Counts& counts() const { return counts_; }

 private:
  struct Held {
    TimePoint due;
    Frame frame;
  };

  std::mt19937_64 random_;
  const size_t frames_max_;
  Duration delay_{0};
  double loss_ = 0;
  std::deque<Held> held_;
  Counts counts_;
};

}  // namespace crumb
