// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "bench/latencies.h"
#include "common/clock.h"

namespace crumb::bench {

struct TimedCallsOptions {
  double seconds = 1;  // all rounds together
  int rounds = 3;
  size_t bytes_per_call = 0;
  size_t calls_max = SIZE_MAX;  // of all rounds together
  std::vector<int> other_pids;  // processes whose CPU time counts too
};

struct TimedCalls {
  uint64_t calls = 0;
  double seconds = 0;
  double gb_per_s = 0;  // 1e9 bytes per second of wall time, median of the rounds
  double p50_us = 0;    // of one call
  double p99_us = 0;
  double cpu_seconds_per_gb = 0;  // of this process and the others; 0 without bytes
};

// Adds up the rounds of a figure. CPU time counts from here on.
class TimedRounds {
 public:
  // Borrows `options`.
  explicit TimedRounds(const TimedCallsOptions& options);

  Duration length() const;  // of each round
  // A round of so many calls that took so long together.
  void Add(uint64_t calls, double seconds);
  TimedCalls Total(const Latencies& latencies) const;

 private:
  const TimedCallsOptions& options_;
  const double cpu_before_;
  TimedCalls total_;
  std::vector<double> rates_;
};

// One call: does the work number `index` and says how long the part that counts took.
using TimedCall = std::function<absl::StatusOr<Duration>(size_t index)>;

// Repeats `call` with 0, 1, 2... for the time given, after a few calls for warming up that do not
// count. Ends early, with what there is, on an interrupt. An error of `call` is returned.
absl::StatusOr<TimedCalls> RunTimedCalls(const TimedCallsOptions& options, const TimedCall& call);

// A TimedCall of which everything counts.
TimedCall Whole(std::function<absl::Status(size_t index)> work);

}  // namespace crumb::bench
