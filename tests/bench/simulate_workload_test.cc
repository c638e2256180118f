// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "bench/simulate_workload.h"

#include <gtest/gtest.h>

#include "bench/synthetic_traces.h"

namespace crumb::bench {
namespace {

constexpr uint64_t kBlockBytes = 1'000'000'000;

BlockTrace Trace(const std::vector<std::vector<uint64_t>>& requests) {
  BlockTrace trace;
  for (const auto& request : requests) trace.Add(request);
  return trace;
}

TEST(SimulateTest, OneNodeHitsWhatItSawAndMovesNothing) {
  const auto row = Simulate(Trace({{1, 2, 3}, {1, 2, 4}, {1, 2, 4}}), 1, 100, 1, kBlockBytes);
  ASSERT_TRUE(row.ok());
  EXPECT_EQ(row->local_hits, 5u);
  EXPECT_EQ(row->remote_hits, 0u);
  EXPECT_EQ(row->pulled_gb, 0);
  EXPECT_EQ(row->pushed_gb, 0);
  EXPECT_EQ(row->hit_rate, row->one_hit_rate);
}

// Requests arrive at two nodes in turn, so that the second one hits nothing on its node.
TEST(SimulateTest, TwoNodesShareByTheHomeOfTheRun) {
  const auto row = Simulate(Trace({{1, 2, 3, 4}, {1, 2, 3, 4}}), 2, 100, 1, kBlockBytes);
  ASSERT_TRUE(row.ok());
  EXPECT_EQ(row->local_hits + row->remote_hits, 4u);
  EXPECT_EQ(row->alone_hit_rate, 0);
  // One of the nodes is the home, to which blocks are pushed or from which they are fetched.
  EXPECT_EQ(row->pulled_gb + row->pushed_gb, 4);
}

TEST(SimulateTest, WithRoomForAllNothingIsLostToSharing) {
  for (const std::string& family : SyntheticFamilyNames()) {
    const auto trace = MakeSyntheticTrace(family, 3);
    ASSERT_TRUE(trace.ok());
    for (const int nodes : {4, 100}) {
      const auto row = Simulate(*trace, nodes, 1 << 30, 1, kBlockBytes);
      ASSERT_TRUE(row.ok());
      EXPECT_DOUBLE_EQ(row->hit_rate, row->one_hit_rate) << family << " " << nodes;
      EXPECT_LE(row->alone_hit_rate, row->hit_rate);
      EXPECT_EQ(row->fanout_over, 0u) << family;
      EXPECT_LE(row->fanout_max, row->fanout_bound);
    }
  }
}

TEST(SimulateTest, AChangeMovesANodesShare) {
  const auto trace = MakeSyntheticTrace(SyntheticFamilyNames().front(), 1);
  ASSERT_TRUE(trace.ok());
  const auto row = Simulate(*trace, 10, 1 << 30, 1, kBlockBytes);
  ASSERT_TRUE(row.ok());
  EXPECT_NEAR(row->remapped_on_join, 1.0 / 11, 0.05);
  EXPECT_NEAR(row->remapped_on_leave, 1.0 / 10, 0.05);
}

TEST(SimulateTest, NodeCountsAreListsAndRanges) {
  EXPECT_EQ(*ParseNodeCounts("4..1000"), (std::vector<int>{4, 16, 64, 256, 1000}));
  EXPECT_EQ(*ParseNodeCounts("3,5"), (std::vector<int>{3, 5}));
  EXPECT_EQ(*ParseNodeCounts("7..7"), std::vector<int>{7});
  for (const char* wrong : {"", "0", "a", "4..", "9..4", "1,,2", "200000", "4..x"}) {
    EXPECT_FALSE(ParseNodeCounts(wrong).ok()) << wrong;
  }
  EXPECT_FALSE(Simulate(Trace({{1}}), 0, 1, 1, 1).ok());
  EXPECT_FALSE(Simulate(Trace({{1}}), 1, 0, 1, 1).ok());
}

}  // namespace
}  // namespace crumb::bench
