// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "models/thread_pool.h"

#include <gtest/gtest.h>

#include <atomic>
#include <thread>
#include <vector>

namespace crumb::models {
namespace {

TEST(ThreadPoolTest, RunsEveryIndexOnce) {
  for (const int threads : {1, 2, 5}) {
    ThreadPool pool(threads);
    EXPECT_EQ(pool.threads(), threads);
    for (const int count : {0, 1, 2, 3, 17, 1000}) {
      std::vector<std::atomic<int>> hits(count);
      pool.ParallelFor(count, [&](int i) { ++hits[i]; });
      for (const auto& hit : hits) EXPECT_EQ(hit, 1);
    }
  }
}

TEST(ThreadPoolTest, HasWrittenEverythingWhenItReturns) {
  ThreadPool pool(4);
  for (int round = 0; round < 500; ++round) {
    std::vector<int> out(8, 0);
    pool.ParallelFor(8, [&](int i) { out[i] = round + i; });
    for (int i = 0; i < 8; ++i) ASSERT_EQ(out[i], round + i);
  }
}

TEST(ThreadPoolTest, CallersTakeTurns) {
  ThreadPool pool(3);
  std::atomic<int64_t> sum = 0;
  std::vector<std::thread> callers;
  for (int c = 0; c < 4; ++c) {
    callers.emplace_back([&] {
      for (int round = 0; round < 100; ++round) pool.ParallelFor(10, [&](int i) { sum += i; });
    });
  }
  for (std::thread& caller : callers) caller.join();
  EXPECT_EQ(sum, 4 * 100 * 45);
}

TEST(ThreadPoolTest, ZeroMeansAtLeastOneThread) {
  ThreadPool pool(0);
  EXPECT_GE(pool.threads(), 1);
}

}  // namespace
}  // namespace crumb::models
