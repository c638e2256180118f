// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "tests/cluster/slow_link.h"

#include <algorithm>
#include <utility>

namespace crumb {

void SlowLink::Offer(Frame frame, TimePoint now) {
  if (std::bernoulli_distribution(loss_)(random_)) {
    ++counts_.lost;
    return;
  }
  if (held_.size() >= frames_max_) {
    ++counts_.overflowed;
    return;
  }
  // A shorter delay does not let a frame overtake those before it.
  const TimePoint due = now + delay_;
  held_.push_back({held_.empty() ? due : std::max(due, held_.back().due), std::move(frame)});
}

std::optional<TimePoint> SlowLink::next_due() const {
  if (held_.empty()) return std::nullopt;
  return held_.front().due;
}

std::optional<Frame> SlowLink::Take(TimePoint now) {
  if (held_.empty() || held_.front().due > now) return std::nullopt;
  Frame frame = std::move(held_.front().frame);
  held_.pop_front();
  ++counts_.passed;
  return frame;
}

}  // namespace crumb
