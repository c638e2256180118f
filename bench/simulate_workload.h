// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "bench/block_trace.h"
#include "bench/simulated_cluster.h"
#include "kernels/tile.h"

// Workload `simulate` runs a trace of prompts over a cluster of nodes, with crumbd's placement and
// directory of holders but without bytes. Requests arrive at the nodes in turn, as behind a router
// without knowledge, at the times of the trace. Every node has a cache of blocks (LRU). Missed
// blocks are computed and kept where the request arrived; the home of their page run is notified of
// them, and given a copy if `push` says so. It serves later requests, or refers them to a node that
// has the blocks. Messages take round trips, and bytes wait at network cards.
namespace crumb::bench {

struct SimulateOptions {
  std::string trace_path;  // empty: use `synthetic`
  std::string synthetic;   // a family of synthetic_traces.h
  uint64_t seed = 1;
  std::vector<int> nodes = {4, 16, 64, 256, 1000};
  double capacity_gb = 64;  // memory of one node, 1e9 bytes
  int replicas = 1;
  std::vector<SimulatedPush> push = {SimulatedPush::kAlways, SimulatedPush::kReused};
  NetworkOptions network;
  double speedup = 1;  // requests arrive so many times faster than in the trace
  kernels::PageFormat format = kernels::PageFormat::kInt2;
  std::string model = "qwen3-8b";
};

// Seconds from a request's arrival until all of its hits on other nodes are there.
struct HitTimes {
  size_t requests = 0;
  double p50 = 0;
  double p99 = 0;
};

// The figures of one number of nodes and one rule for pushing copies.
struct SimulateRow {
  int nodes = 0;
  SimulatedPush push = SimulatedPush::kAlways;
  size_t requests = 0;
  size_t blocks = 0;      // sum over all requests
  size_t local_hits = 0;  // blocks
  size_t remote_hits = 0;
  double hit_rate = 0;          // fraction of blocks, local and remote
  double alone_hit_rate = 0;    // if nodes shared nothing
  double one_hit_rate = 0;      // if one node had all the memory
  double pulled_gb = 0;         // fetched from other nodes
  double pushed_gb = 0;         // pushed to homes
  double hottest_load = 0;      // blocks that the busiest node serves to others, over the mean
  double longest_load = 0;      // the most blocks that one request got from one node, over the mean
  double referred = 0;          // fraction of remote hits that a home referred their reader for
  HitTimes one_hop;             // requests whose remote hits homes served
  HitTimes by_referral;         // requests of which homes referred some to other nodes
  double remapped_on_join = 0;  // fraction of page runs whose home changes when a node joins
  double remapped_on_leave = 0;
  double fanout_mean = 0;  // nodes contacted per request that contacts any
  size_t fanout_max = 0;
  size_t fanout_bound = 0;  // ceil(pages / 32) of the longest request
  size_t fanout_over = 0;   // requests that contacted more than ceil(pages / 32) nodes: 0
  double seconds = 0;
};

// Parses "4,16", or "4..1000": powers of four times the first number, and the last.
// kInvalidArgument: these are not numbers from 1 to 100,000.
absl::StatusOr<std::vector<int>> ParseNodeCounts(std::string_view text);

// Simulates one number of nodes. kInvalidArgument: there is no room for a block, or no node, zone
// or time.
absl::StatusOr<SimulateRow> Simulate(const BlockTrace& trace,
                                     const SimulatedCluster::Options& cluster, double speedup = 1);

// Returns one row per number of nodes and policy of pushes. kInvalidArgument: an option is wrong;
// kNotFound: the trace does not exist.
absl::StatusOr<std::vector<SimulateRow>> RunSimulateWorkload(const SimulateOptions& options);

}  // namespace crumb::bench
