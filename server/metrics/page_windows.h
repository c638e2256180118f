// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "common/clock.h"
#include "common/mutex.h"
#include "common/page_key.h"

namespace crumb::server {

// How many distinct values were added, estimated in 8 KiB: HyperLogLog with 2^13 registers,
// standard error 1.15 %. Not thread-safe. Adding a value that was added before changes nothing.
class CardinalitySketch {
 public:
  CardinalitySketch() : registers_(kRegisters, 0) {}

  // `hash` is uniform over 64 bits and the same for equal values.
  void Add(uint64_t hash);
  // Adds all keys that were added to `other`.
  void Merge(const CardinalitySketch& other);
  // Forgets all values.
  void Clear();
  // Returns the estimated number of distinct values; 0 if none was added.
  double Estimate() const;

 private:
  static constexpr int kIndexBits = 13;
  static constexpr int kRankBits = 64 - kIndexBits;
  static constexpr size_t kRegisters = size_t{1} << kIndexBits;

  std::vector<uint8_t> registers_;  // each the largest rank seen, at most kRankBits + 1
};

// Counts the pages that were requested in the last minutes and hours, and the distinct ones among
// them: 1 - distinct / requested is the hit rate that an unbounded cache would have had. A window
// is a ring of parts and covers all of them, or all but one. Thread-safe. Takes 400 KiB.
class PageWindows {
 public:
  // A window of time, made of `parts` parts of length `part`.
  struct Window {
    const char* name;
    Duration part;
    size_t parts;
  };
  static constexpr std::array<Window, 3> kWindows = {{{"15m", std::chrono::minutes(1), 15},
                                                      {"1h", std::chrono::minutes(5), 12},
                                                      {"24h", std::chrono::hours(1), 24}}};

  // Pages requested within a window, and the estimate of how many distinct ones they were.
  struct Reading {
    const char* window;
    uint64_t requested_pages;
    double unique_pages;
  };

  // `start` is the earliest time that calls name.
  explicit PageWindows(TimePoint start);

  // Counts the pages of one request. Costs three sketches' updates for each key, under a lock.
  void Add(std::span<const PageKey> keys, TimePoint now);
  // Returns one reading for each of kWindows.
  std::array<Reading, kWindows.size()> Read(TimePoint now) const;

 private:
  struct Part {
    int64_t number = 0;  // index of the part since the start
    uint64_t requested = 0;
    CardinalitySketch sketch;
  };
  // The parts of one window; part n is at n modulo their number.
  struct Ring {
    std::vector<Part> parts;
    int64_t newest = 0;
  };

  // Returns the number of the part that `now` falls in, or of the newest one if that is later.
  int64_t PartAt(size_t window, TimePoint now) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const TimePoint start_;
  mutable Mutex mutex_;
  std::array<Ring, kWindows.size()> rings_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace crumb::server
