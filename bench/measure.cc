// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "bench/measure.h"

#include <time.h>

#include <algorithm>
#include <cmath>
#include <csignal>
#include <cstddef>
#include <cstring>
#include <random>
#include <utility>

#include "common/status_macros.h"

namespace crumb::bench {

double ToMicroseconds(Duration duration) {
  return std::chrono::duration<double, std::micro>(duration).count();
}

double ToSeconds(Duration duration) { return std::chrono::duration<double>(duration).count(); }

double Latencies::Percentile(double fraction) const {
  if (microseconds_.empty()) return 0;
  std::vector<double> sorted = microseconds_;
  const double rank = std::ceil(fraction * static_cast<double>(sorted.size()));
  const size_t index = static_cast<size_t>(std::max(rank, 1.0)) - 1;
  std::nth_element(sorted.begin(), sorted.begin() + static_cast<ptrdiff_t>(index), sorted.end());
  return sorted[index];
}

double Median(std::vector<double> values) {
  if (values.empty()) return 0;
  std::sort(values.begin(), values.end());
  const size_t middle = values.size() / 2;
  return values.size() % 2 == 1 ? values[middle] : (values[middle - 1] + values[middle]) / 2;
}

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

namespace {

double Read(clockid_t clock) {
  timespec time{};
  if (::clock_gettime(clock, &time) != 0) return 0;
  return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_nsec) * 1e-9;
}

}  // namespace

double CpuSecondsOf(std::span<const int> pids) {
  double seconds = 0;
  for (const int pid : pids) {
    clockid_t clock;
    if (::clock_getcpuclockid(pid, &clock) == 0) seconds += Read(clock);
  }
  return seconds;
}

double CpuSeconds(std::span<const int> others) {
  return Read(CLOCK_PROCESS_CPUTIME_ID) + CpuSecondsOf(others);
}

uint64_t TouchBytes(std::span<const std::byte> bytes) {
  // Independent sums keep additions from waiting for one another.
  constexpr size_t kLanes = 16;
  uint64_t sums[kLanes] = {};
  size_t at = 0;
  for (; at + sizeof(sums) <= bytes.size(); at += sizeof(sums)) {
    uint64_t words[kLanes];
    std::memcpy(words, bytes.data() + at, sizeof(words));
    for (size_t lane = 0; lane < kLanes; ++lane) sums[lane] += words[lane];
  }
  uint64_t sum = 0;
  for (const uint64_t lane : sums) sum += lane;
  for (; at < bytes.size(); ++at) sum += static_cast<uint64_t>(bytes[at]);
  return sum;
}

namespace {

volatile std::sig_atomic_t interrupted = 0;

void Note(int) { interrupted = 1; }

}  // namespace

void CatchInterrupts() {
  std::signal(SIGINT, Note);
  std::signal(SIGTERM, Note);
}

bool Interrupted() { return interrupted != 0; }

namespace {

constexpr int kDraws = 10000;

double SumOf(const std::vector<double>& values) {
  double sum = 0.0;
  for (const double value : values) sum += value;
  return sum;
}

}  // namespace

Estimate EstimateOf(const std::vector<double>& values) {
  Estimate estimate;
  if (values.empty()) return estimate;
  const double n = static_cast<double>(values.size());
  estimate.mean = SumOf(values) / n;
  double squares = 0.0;
  for (const double value : values) squares += std::pow(value - estimate.mean, 2);
  if (n > 1) estimate.error = std::sqrt(squares / (n - 1) / n);
  return estimate;
}

Interval BootstrapRatio(const std::vector<double>& above, const std::vector<double>& below) {
  std::mt19937 random(1);
  std::vector<double> ratios(kDraws);
  for (double& ratio : ratios) {
    double ours = 0.0, theirs = 0.0;
    for (size_t i = 0; i < above.size(); ++i) {
      const size_t drawn = random() % above.size();
      ours += above[drawn];
      theirs += below[drawn];
    }
    ratio = ours / theirs;
  }
  std::sort(ratios.begin(), ratios.end());
  return {SumOf(above) / SumOf(below), ratios[kDraws / 40], ratios[kDraws - 1 - kDraws / 40]};
}

}  // namespace crumb::bench
