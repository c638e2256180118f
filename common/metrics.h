// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

// Numbers that components count and the server exports. Thread-safe, a few nanoseconds a call.
namespace crumb {

class Counter {
 public:
  void Add(uint64_t amount = 1) { value_.fetch_add(amount, std::memory_order_relaxed); }
  uint64_t value() const { return value_.load(std::memory_order_relaxed); }

 private:
  std::atomic<uint64_t> value_{0};
};

// Counts of values up to each bound, and above the last; with their sum.
class Histogram {
 public:
  explicit Histogram(std::span<const double> bounds);

  void Observe(double value);
  std::span<const double> bounds() const { return bounds_; }
  // Observations in bucket `i`: above bounds[i-1], at most bounds[i]; i == bounds().size(): the
  // rest.
  uint64_t bucket(size_t i) const { return buckets_[i].load(std::memory_order_relaxed); }
  double sum() const { return sum_.load(std::memory_order_relaxed); }

 private:
  std::vector<double> bounds_;  // ascending
  std::unique_ptr<std::atomic<uint64_t>[]> buckets_;
  std::atomic<double> sum_{0};
};

// Seconds from 50 microseconds to 30 seconds, about three bounds a decade.
std::span<const double> LatencyBounds();

// Seconds from one second to a week.
std::span<const double> LifetimeBounds();

}  // namespace crumb
