// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "bench/synthetic_traces.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <vector>

namespace crumb::bench {
namespace {

class SyntheticTraceTest : public ::testing::TestWithParam<std::string> {};

bool Same(const BlockTrace& a, const BlockTrace& b) {
  if (a.requests() != b.requests()) return false;
  for (size_t i = 0; i < a.requests(); ++i) {
    if (!std::ranges::equal(a.request(i), b.request(i))) return false;
  }
  return true;
}

TEST_P(SyntheticTraceTest, SeedDecidesEverything) {
  const BlockTrace trace = *MakeSyntheticTrace(GetParam(), 5);
  EXPECT_TRUE(Same(trace, *MakeSyntheticTrace(GetParam(), 5)));
  EXPECT_FALSE(Same(trace, *MakeSyntheticTrace(GetParam(), 6)));
}

// A block always follows the same block, which holds for all traces of prompts.
TEST_P(SyntheticTraceTest, BlocksFormATree) {
  const BlockTrace trace = *MakeSyntheticTrace(GetParam(), 5);
  constexpr int64_t kUnseen = -2;
  constexpr int64_t kFirst = -1;
  std::vector<int64_t> before(trace.distinct(), kUnseen);
  for (size_t i = 0; i < trace.requests(); ++i) {
    int64_t previous = kFirst;
    ASSERT_FALSE(trace.request(i).empty());
    for (const uint32_t block : trace.request(i)) {
      if (before[block] == kUnseen) before[block] = previous;
      ASSERT_EQ(before[block], previous) << "request " << i;
      previous = block;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Families, SyntheticTraceTest, ::testing::ValuesIn(SyntheticFamilyNames()));

TEST(SyntheticFamilyTest, LoopRepeats) {
  const BlockTrace trace = *MakeSyntheticTrace("loop", 1);
  EXPECT_EQ(trace.requests(), 12000u);
  EXPECT_TRUE(std::ranges::equal(trace.request(7), trace.request(7 + 300 * 39)));
}

// By Zipf's law with exponent 0.9, the most popular of 4,000 documents has 1 / sum k^-0.9 = 6.7 %.
TEST(SyntheticFamilyTest, ZipfFavoursItsFirstDocument) {
  const BlockTrace trace = *MakeSyntheticTrace("zipf", 1);
  std::vector<size_t> requests_of(trace.distinct());
  for (size_t i = 0; i < trace.requests(); ++i) ++requests_of[trace.request(i).front()];
  const double most = static_cast<double>(*std::ranges::max_element(requests_of));
  double sum = 0;
  for (int k = 1; k <= 4000; ++k) sum += std::pow(k, -0.9);
  EXPECT_NEAR(most / static_cast<double>(trace.requests()), 1 / sum, 0.005);
}

TEST(SyntheticFamilyTest, UnknownFamilyListsTheKnown) {
  const absl::Status status = MakeSyntheticTrace("noise", 1).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()), ::testing::HasSubstr("zipf, scan, loop, chats"));
}

}  // namespace
}  // namespace crumb::bench
