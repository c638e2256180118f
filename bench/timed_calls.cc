// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "bench/timed_calls.h"

#include <algorithm>
#include <utility>

#include "bench/cpu_seconds.h"
#include "bench/interrupt.h"
#include "bench/latencies.h"
#include "common/status_macros.h"

namespace crumb::bench {
namespace {

constexpr size_t kWarmUpCalls = 3;

}  // namespace

absl::StatusOr<TimedCalls> RunTimedCalls(const TimedCallsOptions& options, const TimedCall& call) {
  size_t index = 0;
  for (; index < std::min(kWarmUpCalls, options.calls_max / 2); ++index) {
    CRUMB_RETURN_IF_ERROR(call(index).status());
  }
  TimedCalls total;
  Latencies latencies;
  std::vector<double> rates;
  const double cpu_before = CpuSeconds(options.other_pids);
  for (int round = 0; round < options.rounds && !Interrupted(); ++round) {
    const TimePoint begin = Clock::Real().Now();
    const auto length = std::chrono::duration_cast<Duration>(
        std::chrono::duration<double>(options.seconds / options.rounds));
    uint64_t calls = 0;
    double counted_seconds = 0;
    while (Clock::Real().Now() - begin < length && index < options.calls_max && !Interrupted()) {
      CRUMB_ASSIGN_OR_RETURN(const Duration took, call(index++));
      latencies.Add(took);
      counted_seconds += ToSeconds(took);
      ++calls;
    }
    if (calls == 0) break;
    total.calls += calls;
    total.seconds += counted_seconds;
    rates.push_back(static_cast<double>(calls * options.bytes_per_call) / counted_seconds * 1e-9);
  }
  total.gb_per_s = Median(rates);
  total.p50_us = latencies.Percentile(0.5);
  total.p99_us = latencies.Percentile(0.99);
  const double gigabytes = static_cast<double>(total.calls * options.bytes_per_call) * 1e-9;
  if (gigabytes > 0) {
    total.cpu_seconds_per_gb = (CpuSeconds(options.other_pids) - cpu_before) / gigabytes;
  }
  return total;
}

TimedCall Whole(std::function<absl::Status(size_t index)> work) {
  return [work = std::move(work)](size_t index) -> absl::StatusOr<Duration> {
    const TimePoint begin = Clock::Real().Now();
    CRUMB_RETURN_IF_ERROR(work(index));
    return Clock::Real().Now() - begin;
  };
}

}  // namespace crumb::bench
