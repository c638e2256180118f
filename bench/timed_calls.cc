// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "bench/timed_calls.h"

#include <algorithm>
#include <utility>

#include "bench/cpu_seconds.h"
#include "bench/interrupt.h"
#include "common/status_macros.h"

namespace crumb::bench {
namespace {

constexpr size_t kWarmUpCalls = 3;

}  // namespace

TimedRounds::TimedRounds(const TimedCallsOptions& options)
    : options_(options), cpu_before_(CpuSeconds(options.other_pids)) {}

Duration TimedRounds::length() const {
  return std::chrono::duration_cast<Duration>(
      std::chrono::duration<double>(options_.seconds / options_.rounds));
}

void TimedRounds::Add(uint64_t calls, double seconds) {
  total_.calls += calls;
  total_.seconds += seconds;
  rates_.push_back(static_cast<double>(calls * options_.bytes_per_call) / seconds * 1e-9);
}

TimedCalls TimedRounds::Total(const Latencies& latencies) const {
  TimedCalls total = total_;
  total.gb_per_s = Median(rates_);
  total.p50_us = latencies.Percentile(0.5);
  total.p99_us = latencies.Percentile(0.99);
  const double gigabytes = static_cast<double>(total.calls * options_.bytes_per_call) * 1e-9;
  if (gigabytes > 0) {
    total.cpu_seconds_per_gb = (CpuSeconds(options_.other_pids) - cpu_before_) / gigabytes;
  }
  return total;
}

absl::StatusOr<TimedCalls> RunTimedCalls(const TimedCallsOptions& options, const TimedCall& call) {
  size_t index = 0;
  for (; index < std::min(kWarmUpCalls, options.calls_max / 2); ++index) {
    CRUMB_RETURN_IF_ERROR(call(index).status());
  }
  TimedRounds rounds(options);
  Latencies latencies;
  for (int round = 0; round < options.rounds && !Interrupted(); ++round) {
    const TimePoint begin = Clock::Real().Now();
    const Duration length = rounds.length();
    uint64_t calls = 0;
    double counted_seconds = 0;
    while (Clock::Real().Now() - begin < length && index < options.calls_max && !Interrupted()) {
      CRUMB_ASSIGN_OR_RETURN(const Duration took, call(index++));
      latencies.Add(took);
      counted_seconds += ToSeconds(took);
      ++calls;
    }
    if (calls == 0) break;
    rounds.Add(calls, counted_seconds);
  }
  return rounds.Total(latencies);
}

TimedCall Whole(std::function<absl::Status(size_t index)> work) {
  return [work = std::move(work)](size_t index) -> absl::StatusOr<Duration> {
    const TimePoint begin = Clock::Real().Now();
    CRUMB_RETURN_IF_ERROR(work(index));
    return Clock::Real().Now() - begin;
  };
}

}  // namespace crumb::bench
