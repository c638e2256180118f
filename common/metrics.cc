// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "common/metrics.h"

#include <algorithm>

namespace crumb {

Histogram::Histogram(std::span<const double> bounds)
    : bounds_(bounds.begin(), bounds.end()),
      buckets_(std::make_unique<std::atomic<uint64_t>[]>(bounds.size() + 1)) {}

void Histogram::Observe(double value) {
  const auto bucket = std::lower_bound(bounds_.begin(), bounds_.end(), value) - bounds_.begin();
  buckets_[static_cast<size_t>(bucket)].fetch_add(1, std::memory_order_relaxed);
  double sum = sum_.load(std::memory_order_relaxed);
  while (!sum_.compare_exchange_weak(sum, sum + value, std::memory_order_relaxed)) {
  }
}

std::span<const double> LatencyBounds() {
  static constexpr double kBounds[] = {50e-6, 100e-6, 250e-6, 500e-6, 1e-3, 2.5e-3,
                                       5e-3,  10e-3,  25e-3,  50e-3,  0.1,  0.25,
                                       0.5,   1,      2.5,    5,      10,   30};
  return kBounds;
}

std::span<const double> LifetimeBounds() {
  static constexpr double kBounds[] = {1,    5,     15,    60,    300,    900,
                                       3600, 10800, 43200, 86400, 259200, 604800};
  return kBounds;
}

}  // namespace crumb
