// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "server/metrics/page_windows.h"

#include <cmath>
#include <random>
#include <set>
#include <thread>
#include <vector>

#include "gtest/gtest.h"

namespace crumb::server {
namespace {

using std::chrono::hours;
using std::chrono::minutes;

PageKey KeyOf(uint64_t number) {
  PageKey key;
  key.bytes = Sha256(std::string_view(reinterpret_cast<const char*>(&number), sizeof(number)));
  return key;
}

std::vector<PageKey> KeysOf(uint64_t first, uint64_t count) {
  std::vector<PageKey> keys;
  for (uint64_t i = 0; i < count; ++i) keys.push_back(KeyOf(first + i));
  return keys;
}

TEST(CardinalitySketchTest, EstimatesWithinFourStandardErrors) {
  std::mt19937_64 random(7);
  CardinalitySketch sketch;
  uint64_t added = 0;
  EXPECT_EQ(sketch.Estimate(), 0);
  for (const uint64_t count : {1, 10, 100, 1'000, 8'192, 20'000, 40'000, 100'000, 1'000'000}) {
    for (; added < count; ++added) sketch.Add(random());
    // Small counts are exact but for collisions of registers.
    const double tolerance = std::max(0.5, 4 * 0.0115 * static_cast<double>(count));
    EXPECT_NEAR(sketch.Estimate(), static_cast<double>(count), tolerance) << count;
  }
}

TEST(CardinalitySketchTest, RepetitionsAndTheOrderOfMergesChangeNothing) {
  std::mt19937_64 random(8);
  CardinalitySketch all, even, odd;
  for (int i = 0; i < 50'000; ++i) {
    const uint64_t hash = random();
    all.Add(hash);
    all.Add(hash);
    (i % 2 == 0 ? even : odd).Add(hash);
  }
  odd.Merge(even);
  EXPECT_EQ(odd.Estimate(), all.Estimate());
  odd.Clear();
  EXPECT_EQ(odd.Estimate(), 0);
}

TEST(CardinalitySketchTest, ExtremeHashesStayInside) {
  CardinalitySketch sketch;
  for (int i = 0; i < 100; ++i) {
    sketch.Add(0);
    sketch.Add(~uint64_t{0});
  }
  EXPECT_NEAR(sketch.Estimate(), 2, 0.5);
}

TEST(PageWindowsTest, CountsRequestedAndDistinctPages) {
  const TimePoint start{};
  PageWindows windows(start);
  for (int i = 0; i < 3; ++i) windows.Add(KeysOf(0, 1'000), start + minutes(i));
  for (const auto& reading : windows.Read(start + minutes(2))) {
    EXPECT_EQ(reading.requested_pages, 3'000u) << reading.window;
    EXPECT_NEAR(reading.unique_pages, 1'000, 50) << reading.window;
  }
}

TEST(PageWindowsTest, PagesLeaveEachWindowInTime) {
  const TimePoint start{};
  PageWindows windows(start);
  windows.Add(KeysOf(0, 500), start);
  const auto pages_at = [&](TimePoint at) {
    std::vector<uint64_t> requested;
    for (const auto& reading : windows.Read(at)) requested.push_back(reading.requested_pages);
    return requested;
  };
  EXPECT_EQ(pages_at(start + minutes(14)), (std::vector<uint64_t>{500, 500, 500}));
  EXPECT_EQ(pages_at(start + minutes(15)), (std::vector<uint64_t>{0, 500, 500}));
  EXPECT_EQ(pages_at(start + minutes(59)), (std::vector<uint64_t>{0, 500, 500}));
  EXPECT_EQ(pages_at(start + minutes(60)), (std::vector<uint64_t>{0, 0, 500}));
  EXPECT_EQ(pages_at(start + hours(24)), (std::vector<uint64_t>{0, 0, 0}));
  for (const auto& reading : windows.Read(start + hours(24))) EXPECT_EQ(reading.unique_pages, 0);
}

TEST(PageWindowsTest, AgreesWithAModelOverGapsAndTimesBefore) {
  std::mt19937 random(11);
  const TimePoint start{};
  PageWindows windows(start);
  std::vector<std::pair<int64_t, uint64_t>> history;  // minute, page
  int64_t minute = 0;
  for (int step = 0; step < 300; ++step) {
    minute += random() % 8 == 0 ? random() % 90 : random() % 3;
    const uint64_t first = random() % 400;
    for (uint64_t i = 0; i < 20; ++i) history.emplace_back(minute, first + i);
    windows.Add(KeysOf(first, 20), start + minutes(minute));
    (void)windows.Read(start);  // a clock that is behind changes nothing
    const auto readings = windows.Read(start + minutes(minute));
    for (size_t w = 0; w < readings.size(); ++w) {
      const int64_t part = PageWindows::kWindows[w].part / minutes(1);
      const auto parts = static_cast<int64_t>(PageWindows::kWindows[w].parts);
      uint64_t requested = 0;
      std::set<uint64_t> pages;
      for (const auto& [when, page] : history) {
        if (when / part <= minute / part - parts) continue;
        ++requested;
        pages.insert(page);
      }
      ASSERT_EQ(readings[w].requested_pages, requested) << readings[w].window << " step " << step;
      ASSERT_NEAR(readings[w].unique_pages, static_cast<double>(pages.size()),
                  1 + 0.05 * static_cast<double>(pages.size()));
    }
  }
}

TEST(PageWindowsTest, ManyThreadsLoseNothing) {
  const TimePoint start{};
  PageWindows windows(start);
  std::vector<std::thread> threads;
  for (uint64_t t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      for (uint64_t i = 0; i < 100; ++i) windows.Add(KeysOf(t * 1'000 + i * 10, 10), start);
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(windows.Read(start)[0].requested_pages, 4'000u);
}

}  // namespace
}  // namespace crumb::server
