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

SimulatedCluster::Options Cluster(int nodes, size_t capacity_blocks,
                                  SimulatedPush push = SimulatedPush::kAlways) {
  SimulatedCluster::Options options;
  options.nodes = nodes;
  options.capacity_blocks = capacity_blocks;
  options.push = push;
  options.block_bytes = kBlockBytes;
  return options;
}

TEST(SimulateTest, OneNodeHitsWhatItSawAndMovesNothing) {
  const auto row = Simulate(Trace({{1, 2, 3}, {1, 2, 4}, {1, 2, 4}}), Cluster(1, 100));
  ASSERT_TRUE(row.ok());
  EXPECT_EQ(row->local_hits, 5u);
  EXPECT_EQ(row->remote_hits, 0u);
  EXPECT_EQ(row->pulled_gb, 0);
  EXPECT_EQ(row->pushed_gb, 0);
  EXPECT_EQ(row->hit_rate, row->one_hit_rate);
}

// Requests arrive at two nodes in turn, so that the second one hits nothing on its node.
TEST(SimulateTest, TwoNodesShareByTheHomeOfTheRun) {
  const BlockTrace trace = Trace({{1, 2, 3, 4}, {1, 2, 3, 4}});
  const auto row = Simulate(trace, Cluster(2, 100));
  ASSERT_TRUE(row.ok());
  EXPECT_EQ(row->local_hits + row->remote_hits, 4u);
  EXPECT_EQ(row->alone_hit_rate, 0);
  // One of the nodes is the home, to which blocks are pushed or from which they are fetched.
  EXPECT_EQ(row->pulled_gb + row->pushed_gb, 4);
  const auto reused = Simulate(trace, Cluster(2, 100, SimulatedPush::kReused));
  ASSERT_TRUE(reused.ok());
  EXPECT_EQ(reused->remote_hits, 4u);
  EXPECT_EQ(reused->pulled_gb, 4);
  EXPECT_EQ(reused->pushed_gb, 0);
}

TEST(SimulateTest, WithRoomForAllNothingIsLostToSharing) {
  for (const SimulatedPush push : {SimulatedPush::kAlways, SimulatedPush::kReused}) {
    for (const std::string& family : SyntheticFamilyNames()) {
      const auto trace = MakeSyntheticTrace(family, 3);
      ASSERT_TRUE(trace.ok());
      for (const int nodes : {4, 50}) {
        const auto row = Simulate(*trace, Cluster(nodes, 1 << 30, push));
        ASSERT_TRUE(row.ok());
        EXPECT_DOUBLE_EQ(row->hit_rate, row->one_hit_rate) << family << " " << nodes;
        EXPECT_LE(row->alone_hit_rate, row->hit_rate);
        EXPECT_EQ(row->fanout_over, 0u) << family;
        EXPECT_LE(row->fanout_max, row->fanout_bound);
        EXPECT_EQ(row->pushed_gb == 0, push == SimulatedPush::kReused);
      }
    }
  }
}

TEST(SimulateTest, AChangeMovesANodesShare) {
  const auto trace = MakeSyntheticTrace(SyntheticFamilyNames().front(), 1);
  ASSERT_TRUE(trace.ok());
  const auto row = Simulate(*trace, Cluster(10, 1 << 30));
  ASSERT_TRUE(row.ok());
  EXPECT_NEAR(row->remapped_on_join, 1.0 / 11, 0.05);
  EXPECT_NEAR(row->remapped_on_leave, 1.0 / 10, 0.05);
}

// A prompt that every node reads once: each reader becomes a holder, so no node serves many.
TEST(SimulateTest, AHotPromptIsServedByAllThatHaveIt) {
  std::vector<std::vector<uint64_t>> requests(64, {1, 2, 3, 4});
  for (const SimulatedPush push : {SimulatedPush::kAlways, SimulatedPush::kReused}) {
    const auto row = Simulate(Trace(requests), Cluster(64, 100, push));
    ASSERT_TRUE(row.ok());
    EXPECT_EQ(row->local_hits + row->remote_hits, 63u * 4);
    // Without referrals one home would serve 63 of 63, 64 means.
    EXPECT_LE(row->hottest_load, 13);
    EXPECT_GT(row->referred, 0.8);
  }
}

// A path whose times follow from the network's: blocks of 1 GB over 8 Gbit/s take a second each.
TEST(SimulateTest, HitsTakeRoundTripsAndQueues) {
  SimulatedCluster::Options options = Cluster(2, 100, SimulatedPush::kReused);
  options.network = {.rtt_us = 0, .rtt_zones_us = 200'000, .zones = 2, .nic_gbit = 8};
  const auto row = Simulate(Trace({{1, 2}, {1, 2}}), options);
  ASSERT_TRUE(row.ok());
  const bool referred = row->by_referral.requests == 1;
  ASSERT_EQ(row->one_hop.requests + row->by_referral.requests, 1u);
  // Asking takes a round trip, fetching another one; the node that is its own home knows at once
  // whom to ask.
  const double seconds = referred ? row->by_referral.p50 : row->one_hop.p50;
  EXPECT_NEAR(seconds, 2 * 0.2 + 2, 1e-6);
}

TEST(SimulateTest, TransfersWaitForTheCardsOfBothEnds) {
  SimulatedNetwork network(3, {.rtt_us = 1000, .rtt_zones_us = 0, .zones = 1, .nic_gbit = 8});
  constexpr uint64_t kGb = 1'000'000'000;
  EXPECT_NEAR(network.Send(0, 1, 0, kGb), 1.0005, 1e-9);
  EXPECT_NEAR(network.Send(0, 2, 0, kGb), 2.0005, 1e-9);    // queues after the first at node 0
  EXPECT_NEAR(network.Send(2, 1, 0, kGb), 2.0005, 1e-9);    // queues after the first at node 1
  EXPECT_NEAR(network.Send(2, 0, 10, kGb), 11.0005, 1e-9);  // nothing is in its way
}

TEST(SimulateTest, RequestsArriveAtTheTracesTimes) {
  std::optional<uint64_t> time;
  ASSERT_TRUE(ParseTraceLine(R"({"timestamp": 1500, "hash_ids": [3]})", &time).ok());
  EXPECT_EQ(time, 1500u);
  BlockTrace trace;
  const std::vector<uint64_t> names = {1};
  trace.Add(names);
  trace.Add(names, 1500);
  trace.Add(names);
  EXPECT_EQ(trace.seconds(0), 0);
  EXPECT_EQ(trace.seconds(1), 1.5);
  EXPECT_DOUBLE_EQ(trace.seconds(2), 1.5 + BlockTrace::kIntervalSeconds);
}

TEST(SimulateTest, NodeCountsAreListsAndRanges) {
  EXPECT_EQ(*ParseNodeCounts("4..1000"), (std::vector<int>{4, 16, 64, 256, 1000}));
  EXPECT_EQ(*ParseNodeCounts("3,5"), (std::vector<int>{3, 5}));
  EXPECT_EQ(*ParseNodeCounts("7..7"), std::vector<int>{7});
  for (const char* wrong : {"", "0", "a", "4..", "9..4", "1,,2", "200000", "4..x"}) {
    EXPECT_FALSE(ParseNodeCounts(wrong).ok()) << wrong;
  }
  EXPECT_FALSE(Simulate(Trace({{1}}), Cluster(0, 1)).ok());
  EXPECT_FALSE(Simulate(Trace({{1}}), Cluster(1, 0)).ok());
  EXPECT_FALSE(Simulate(Trace({{1}}), Cluster(1, 1), 0).ok());
}

}  // namespace
}  // namespace crumb::bench
