// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
// Tests latencies, timed calls, CPU seconds and raw limits.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmath>
#include <fstream>
#include <numeric>
#include <random>
#include <thread>

#include "bench/measure.h"
#include "bench/raw_limits.h"
#include "common/unique_fd.h"
#include "tests/common/temporary_folder.h"

namespace crumb::bench {
namespace {

TEST(LatenciesTest, PercentilesAreObservedValues) {
  Latencies latencies;
  EXPECT_EQ(latencies.Percentile(0.5), 0);
  for (int us = 100; us >= 1; --us) latencies.Add(std::chrono::microseconds(us));
  EXPECT_EQ(latencies.count(), 100u);
  EXPECT_DOUBLE_EQ(latencies.Percentile(0.5), 50);
  EXPECT_DOUBLE_EQ(latencies.Percentile(0.99), 99);
  EXPECT_DOUBLE_EQ(latencies.Percentile(1), 100);
  EXPECT_DOUBLE_EQ(latencies.Percentile(0), 1);
}

TEST(LatenciesTest, MedianOfEvenCountsIsTheMiddlesMean) {
  EXPECT_EQ(Median({}), 0);
  EXPECT_EQ(Median({3, 1, 2}), 2);
  EXPECT_EQ(Median({4, 1, 2, 3}), 2.5);
}

TEST(TimedCallsTest, CountsWhatTheCallSaysItTook) {
  TimedCallsOptions options;
  options.seconds = 60;
  options.rounds = 1;
  options.calls_max = 13;  // three of them for warming up
  options.bytes_per_call = 1'000'000;
  std::vector<size_t> seen;
  const auto timed = RunTimedCalls(options, [&](size_t index) -> absl::StatusOr<Duration> {
    seen.push_back(index);
    return std::chrono::milliseconds(2);
  });
  ASSERT_TRUE(timed.ok()) << timed.status();
  std::vector<size_t> expected(13);
  std::iota(expected.begin(), expected.end(), size_t{0});
  EXPECT_EQ(seen, expected);
  EXPECT_EQ(timed->calls, 10u);
  EXPECT_NEAR(timed->seconds, 0.02, 1e-9);
  EXPECT_NEAR(timed->gb_per_s, 0.5, 1e-9);
  EXPECT_DOUBLE_EQ(timed->p50_us, 2000);
}

TEST(TimedCallsTest, AnErrorEndsTheRun) {
  TimedCallsOptions options;
  options.seconds = 60;
  const auto timed = RunTimedCalls(options, Whole([](size_t index) {
                                     return index < 5 ? absl::OkStatus() : absl::AbortedError("no");
                                   }));
  EXPECT_EQ(timed.status().code(), absl::StatusCode::kAborted);
}

TEST(CpuSecondsTest, GrowsWithWorkAndCountsOtherProcesses) {
  const double before = CpuSeconds({});
  // Work for 50 ms of CPU time.
  while (CpuSeconds({}) - before < 0.05) {
  }
  const int self[] = {::getpid()};
  EXPECT_GT(CpuSeconds(self), CpuSeconds({}));
  const int unused[] = {1 << 27};  // more than the kernel gives
  EXPECT_EQ(CpuSecondsOf(unused), 0);
}

// Works for 3 ms of CPU time in a thread that ends, writes its CPU time to `out`, and sleeps.
[[noreturn]] void WorkAndSleep(int out) {
  std::thread([] {
    while (CpuSeconds({}) < 3e-3) {
    }
  }).join();
  const double told = CpuSeconds({});
  if (::write(out, &told, sizeof(told)) != sizeof(told)) ::_exit(1);
  while (true) ::pause();
}

// The CPU time of another process is between the time that it read itself and the time that the
// kernel charged in the end, which is closer than the 10 ms of /proc.
TEST(CpuSecondsTest, OtherProcessesAreCountedFinerThanTicks) {
  int ends[2];
  ASSERT_EQ(::pipe2(ends, O_CLOEXEC), 0);
  const UniqueFd from(ends[0]), to(ends[1]);
  const int child[] = {::fork()};
  ASSERT_GE(child[0], 0);
  if (child[0] == 0) WorkAndSleep(to.get());
  double told = 0;
  EXPECT_EQ(::read(from.get(), &told, sizeof(told)), static_cast<ssize_t>(sizeof(told)));
  const double read = CpuSecondsOf(child);
  EXPECT_EQ(::kill(child[0], SIGKILL), 0);
  rusage usage{};
  int status = 0;
  ASSERT_EQ(::wait4(child[0], &status, 0, &usage), child[0]);
  const auto seconds = [](const timeval& time) { return time.tv_sec + time.tv_usec * 1e-6; };
  EXPECT_GE(told, 3e-3);
  EXPECT_GE(read, told);
  EXPECT_LE(read, seconds(usage.ru_utime) + seconds(usage.ru_stime) + 1e-5);
  EXPECT_EQ(CpuSecondsOf(child), 0);  // gone
}

TEST(TouchTest, SumsEveryByte) {
  for (const size_t size : {0, 1, 127, 128, 129, 1000}) {
    std::vector<std::byte> bytes(size);
    const uint64_t zero = TouchBytes(bytes);
    for (size_t at = 0; at < size; ++at) {
      bytes[at] = std::byte{1};
      EXPECT_NE(TouchBytes(bytes), zero) << "byte " << at << " of " << size;
      bytes[at] = std::byte{0};
    }
  }
}

TEST(RawLimitsTest, MeasureSomething) {
  constexpr Duration kShort = std::chrono::milliseconds(5);
  EXPECT_GT(MemoryReadGbPerS(1 << 20, kShort), 0);
  EXPECT_GT(MemoryCopyGbPerS(1 << 20, kShort), 0);
  const auto tcp = LoopbackTcpGbPerS(kShort);
  ASSERT_TRUE(tcp.ok()) << tcp.status();
  EXPECT_GT(*tcp, 0);
}

TEST(RawLimitsTest, DirectReadsNeedAWholePiece) {
  const TemporaryFolder folder;
  DirectReadOptions options;
  options.folder = folder.path();
  options.piece_bytes = 8192;
  options.bytes_max = 1 << 20;
  EXPECT_EQ(DirectReadGbPerS(options).status().code(), absl::StatusCode::kNotFound);
  std::ofstream(folder.File("pages")) << std::string(100'000, 'x');
  const auto rate = DirectReadGbPerS(options);
  if (rate.status().code() == absl::StatusCode::kInvalidArgument) {
    GTEST_SKIP() << "needs direct I/O in the temporary folder; set TMPDIR to one on a disk";
  }
  ASSERT_TRUE(rate.ok()) << rate.status();
  EXPECT_GT(*rate, 0);
}

TEST(StatisticsTest, EstimatesTheMeanAndItsError) {
  const Estimate estimate = EstimateOf({1.0, 2.0, 3.0, 6.0});
  EXPECT_DOUBLE_EQ(estimate.mean, 3.0);
  EXPECT_DOUBLE_EQ(estimate.error, std::sqrt((4.0 + 1.0 + 0.0 + 9.0) / 3 / 4));
  EXPECT_EQ(EstimateOf({5.0}).error, 0.0);
  EXPECT_EQ(EstimateOf({}).mean, 0.0);
}

TEST(StatisticsTest, ProportionalColumnsHaveNoSpread) {
  const Interval ratio = BootstrapRatio({1.0, 2.0, 8.0}, {2.0, 4.0, 16.0});
  EXPECT_DOUBLE_EQ(ratio.value, 0.5);
  EXPECT_DOUBLE_EQ(ratio.low, 0.5);
  EXPECT_DOUBLE_EQ(ratio.high, 0.5);
}

// With two entries, a draw has the first one twice, both, or the second one twice, with
// probabilities 1/4, 1/2 and 1/4.
TEST(StatisticsTest, TwoEntriesReachBothEnds) {
  const Interval ratio = BootstrapRatio({1.0, 3.0}, {1.0, 1.0});
  EXPECT_DOUBLE_EQ(ratio.value, 2.0);
  EXPECT_DOUBLE_EQ(ratio.low, 1.0);
  EXPECT_DOUBLE_EQ(ratio.high, 3.0);
}

// The interval of the mean of many normal values is the mean plus and minus 1.96 standard errors.
TEST(StatisticsTest, AgreesWithTheNormalInterval) {
  std::mt19937 random(7);
  std::normal_distribution<double> normal(10.0, 2.0);
  std::vector<double> values, ones;
  for (int i = 0; i < 400; ++i) {
    values.push_back(normal(random));
    ones.push_back(1.0);
  }
  const Interval interval = BootstrapRatio(values, ones);
  const Estimate estimate = EstimateOf(values);
  EXPECT_NEAR(interval.value, estimate.mean, 1e-9);
  EXPECT_NEAR(interval.low, estimate.mean - 1.96 * estimate.error, 0.1 * estimate.error);
  EXPECT_NEAR(interval.high, estimate.mean + 1.96 * estimate.error, 0.1 * estimate.error);
}

// Correlated sides have a narrow ratio, however wide each of them is.
TEST(StatisticsTest, PairsAreDrawnTogether) {
  std::vector<double> ours, theirs, shuffled;
  for (int i = 0; i < 64; ++i) {
    theirs.push_back(i % 2 == 0 ? 1.0 : 100.0);
    ours.push_back(theirs.back() * 0.3);
    shuffled.push_back((i / 2) % 2 == 0 ? 0.3 : 30.0);
  }
  const Interval paired = BootstrapRatio(ours, theirs);
  const Interval unpaired = BootstrapRatio(shuffled, theirs);
  EXPECT_LT(paired.high - paired.low, 1e-9);
  EXPECT_GT(unpaired.high - unpaired.low, 0.05);
}

}  // namespace
}  // namespace crumb::bench
