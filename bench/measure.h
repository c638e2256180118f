// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/clock.h"

namespace crumb::bench {

// Return the duration as a number of microseconds, or of seconds.
double ToMicroseconds(Duration duration);
double ToSeconds(Duration duration);

// The durations of single operations. Not thread-safe.
class Latencies {
 public:
  void Add(Duration duration) { microseconds_.push_back(ToMicroseconds(duration)); }
  // Adds the durations of another thread.
  void Add(const Latencies& others) {
    microseconds_.insert(microseconds_.end(), others.microseconds_.begin(),
                         others.microseconds_.end());
  }
  size_t count() const { return microseconds_.size(); }

  // Returns the least value that the given fraction (0 to 1) of the operations does not exceed, or
  // 0 without operations.
  double Percentile(double fraction) const;

 private:
  std::vector<double> microseconds_;
};

// Returns the middle value, or the mean of the middle two; 0 if there are no values.
double Median(std::vector<double> values);

struct TimedCallsOptions {
  double seconds = 1;  // sum over all rounds
  int rounds = 3;
  size_t bytes_per_call = 0;
  size_t calls_max = SIZE_MAX;  // limit for all rounds together
  std::vector<int> other_pids;  // processes whose CPU time is added
};

struct TimedCalls {
  uint64_t calls = 0;
  double seconds = 0;
  double gb_per_s = 0;  // 1e9 bytes per second of wall time, median of the rounds
  double p50_us = 0;    // time of one call
  double p99_us = 0;
  double cpu_seconds_per_gb = 0;  // CPU time of all processes; 0 without bytes
};

// Adds up the rounds of a figure. CPU time is counted from the construction on.
class TimedRounds {
 public:
  // `options` must outlive this.
  explicit TimedRounds(const TimedCallsOptions& options);

  Duration length() const;  // length of a round
  // Adds a round of `calls` calls that took `took` together.
  void Add(uint64_t calls, double seconds);
  TimedCalls Total(const Latencies& latencies) const;

 private:
  const TimedCallsOptions& options_;
  const double cpu_before_;
  TimedCalls total_;
  std::vector<double> rates_;
};

// One call: does the work of number `index` and returns the time of its measured part.
using TimedCall = std::function<absl::StatusOr<Duration>(size_t index)>;

// Repeats `call` with 0, 1, 2... for options.seconds, after a few calls that are not measured. An
// interrupt ends it early, with the calls so far. An error of `call` is returned.
absl::StatusOr<TimedCalls> RunTimedCalls(const TimedCallsOptions& options, const TimedCall& call);

// Returns a TimedCall that measures all of `work`.
TimedCall Whole(std::function<absl::Status(size_t index)> work);

// Returns the CPU seconds of all threads of the processes `pids`, including ended threads, in user
// and kernel mode. They come from the scheduler's clocks, which count nanoseconds. A process that
// has ended or is invisible to this one has 0.
double CpuSecondsOf(std::span<const int> pids);

// Returns the CPU seconds of this process and of `others`.
double CpuSeconds(std::span<const int> others);

// Reads every byte once, at the speed of memory. Returns their sum, so that the compiler cannot
// omit the reads.
uint64_t TouchBytes(std::span<const std::byte> bytes);

// Keeps the compiler from omitting the computation of `value`.
inline void KeepResult(uint64_t value) { asm volatile("" : : "r"(value) : "memory"); }

// Makes SIGINT and SIGTERM set a flag instead of ending the process.
void CatchInterrupts();

// Returns whether one of these signals arrived. Loops check it and return their results so far.
bool Interrupted();

// A mean and its standard error.
struct Estimate {
  double mean = 0.0;
  double error = 0.0;  // 0 for fewer than two values
};

Estimate EstimateOf(const std::vector<double>& values);

// A figure and the 2.5 % and 97.5 % points of its bootstrap distribution.
struct Interval {
  double value = 0.0;
  double low = 0.0;
  double high = 0.0;
};

// Returns sum(above) / sum(below) with its paired bootstrap: every draw picks the same entries of
// both. Deterministic. REQUIRES: below's sum is positive in every draw. With sums over clusters in
// `above` and the clusters' sizes in `below`, it is the mean over units in clusters.
Interval BootstrapRatio(const std::vector<double>& above, const std::vector<double>& below);

}  // namespace crumb::bench
