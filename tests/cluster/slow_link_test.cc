// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "tests/cluster/slow_link.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <numeric>

namespace crumb {
namespace {

using std::chrono::milliseconds;

Frame Numbered(uint32_t number) {
  Frame frame(sizeof(number));
  std::memcpy(frame.data(), &number, sizeof(number));
  return frame;
}

std::vector<uint32_t> TakeAll(SlowLink& link, TimePoint now) {
  std::vector<uint32_t> numbers;
  while (const auto frame = link.Take(now)) {
    std::memcpy(&numbers.emplace_back(), frame->data(), sizeof(uint32_t));
  }
  return numbers;
}

TEST(SlowLinkTest, WithoutARuleEveryFramePassesAtOnceAndInOrder) {
  SlowLink link(1, 100);
  const TimePoint now{};
  EXPECT_EQ(link.next_due(), std::nullopt);
  for (uint32_t i = 0; i < 100; ++i) link.Offer(Numbered(i), now);
  EXPECT_EQ(link.next_due(), now);
  std::vector<uint32_t> expected(100);
  std::iota(expected.begin(), expected.end(), 0);
  EXPECT_EQ(TakeAll(link, now), expected);
  EXPECT_EQ(link.counts().passed, 100u);
}

TEST(SlowLinkTest, AFrameIsHeldBackForTheDelayAndNoShorter) {
  SlowLink link(1, 100);
  const TimePoint now{};
  link.SetDelay(milliseconds(50));
  link.Offer(Numbered(7), now);
  EXPECT_EQ(link.next_due(), now + milliseconds(50));
  EXPECT_EQ(link.Take(now + milliseconds(50) - Duration(1)), std::nullopt);
  EXPECT_EQ(TakeAll(link, now + milliseconds(50)), std::vector<uint32_t>{7});
}

TEST(SlowLinkTest, AShorterDelayLetsNothingOvertake) {
  SlowLink link(1, 100);
  const TimePoint now{};
  link.SetDelay(milliseconds(50));
  link.Offer(Numbered(1), now);
  link.SetDelay(milliseconds(0));
  link.Offer(Numbered(2), now + milliseconds(10));
  EXPECT_EQ(link.Take(now + milliseconds(49)), std::nullopt);
  EXPECT_EQ(TakeAll(link, now + milliseconds(50)), (std::vector<uint32_t>{1, 2}));
}

TEST(SlowLinkTest, OverItsBoundItDropsTheNewest) {
  SlowLink link(1, 3);
  const TimePoint now{};
  link.SetDelay(milliseconds(1));
  for (uint32_t i = 0; i < 5; ++i) link.Offer(Numbered(i), now);
  EXPECT_EQ(TakeAll(link, now + milliseconds(1)), (std::vector<uint32_t>{0, 1, 2}));
  EXPECT_EQ(link.counts().overflowed, 2u);
}

TEST(SlowLinkTest, ItLosesItsShareAndTheSeedSaysWhich) {
  constexpr uint32_t kFrames = 100'000;
  constexpr double kLoss = 0.01;
  const auto survivors = [](uint64_t seed) {
    SlowLink link(seed, kFrames);
    link.SetLoss(kLoss);
    for (uint32_t i = 0; i < kFrames; ++i) link.Offer(Numbered(i), TimePoint{});
    std::vector<uint32_t> passed = TakeAll(link, TimePoint{});
    EXPECT_EQ(link.counts().lost + passed.size(), uint64_t{kFrames});
    return passed;
  };
  const auto passed = survivors(42);
  // Six standard deviations of a binomial distribution.
  const double deviation = std::sqrt(kFrames * kLoss * (1 - kLoss));
  EXPECT_NEAR(kFrames - static_cast<double>(passed.size()), kFrames * kLoss, 6 * deviation);
  EXPECT_EQ(survivors(42), passed);
  EXPECT_NE(survivors(43), passed);
  EXPECT_TRUE(std::is_sorted(passed.begin(), passed.end()));
}

}  // namespace
}  // namespace crumb
