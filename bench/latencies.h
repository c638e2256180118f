// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

#include "common/clock.h"

namespace crumb::bench {

double ToMicroseconds(Duration duration);
double ToSeconds(Duration duration);

// Durations of single operations. Not thread-safe.
class Latencies {
 public:
  void Add(Duration duration) { microseconds_.push_back(ToMicroseconds(duration)); }
  void Add(const Latencies& others) {
    microseconds_.insert(microseconds_.end(), others.microseconds_.begin(),
                         others.microseconds_.end());
  }
  size_t count() const { return microseconds_.size(); }

  // The least value that `share` (0 to 1) of the operations did not exceed; 0 without operations.
  double Percentile(double share) const;

 private:
  std::vector<double> microseconds_;
};

// The middle value, or the mean of the middle two; 0 of nothing.
double Median(std::vector<double> values);

}  // namespace crumb::bench
