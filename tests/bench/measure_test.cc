// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
// What workloads measure with: latencies, timed calls, CPU seconds, raw limits.
#include <gtest/gtest.h>
#include <unistd.h>

#include <fstream>
#include <numeric>

#include "bench/cpu_seconds.h"
#include "bench/latencies.h"
#include "bench/raw_limits.h"
#include "bench/timed_calls.h"
#include "bench/touch.h"
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
  // Work by the CPU's own clock: 50 ms of it.
  while (CpuSeconds({}) - before < 0.05) {
  }
  const int self[] = {::getpid()};
  EXPECT_GT(CpuSeconds(self), CpuSeconds({}));
  const int nobody[] = {0x3fffffff};
  EXPECT_NEAR(CpuSeconds(nobody), CpuSeconds({}), 0.05);
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
    GTEST_SKIP() << "the temporary folder's file system has no direct I/O";
  }
  ASSERT_TRUE(rate.ok()) << rate.status();
  EXPECT_GT(*rate, 0);
}

}  // namespace
}  // namespace crumb::bench
