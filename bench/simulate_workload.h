// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "bench/block_trace.h"
#include "kernels/tile.h"

// Workload `simulate`: a trace of prompts over a cluster of so many nodes, with crumbd's own
// placement and without a byte. Requests arrive at the nodes in turn, as behind a router that knows
// nothing. Every node has a cache of its own (LRU, by blocks); what a request misses is computed,
// kept where it arrived and pushed to the home of its run, which serves later requests.
namespace crumb::bench {

struct SimulateOptions {
  std::string trace_path;  // or
  std::string synthetic;   // a family of synthetic_traces.h
  uint64_t seed = 1;
  std::vector<int> nodes = {4, 16, 64, 256, 1000};
  double capacity_gb = 64;  // of one node, 1e9 bytes
  int replicas = 1;
  kernels::PageFormat format = kernels::PageFormat::kInt2;
  std::string model = "qwen3-8b";
};

struct SimulateRow {
  int nodes = 0;
  size_t requests = 0;
  size_t blocks = 0;      // of all requests
  size_t local_hits = 0;  // blocks
  size_t remote_hits = 0;
  double hit_rate = 0;          // of blocks, local and remote
  double alone_hit_rate = 0;    // the same nodes, sharing nothing
  double one_hit_rate = 0;      // one node with the memory of all
  double pulled_gb = 0;         // between nodes, to requests
  double pushed_gb = 0;         // between nodes, to homes
  double hottest_load = 0;      // blocks served to others by the busiest node, over the mean
  double remapped_on_join = 0;  // share of the runs whose home changes when one node comes
  double remapped_on_leave = 0;
  double fanout_mean = 0;  // nodes asked by a request that asked any
  size_t fanout_max = 0;
  size_t fanout_bound = 0;  // ceil(pages / 32) of the longest request
  size_t fanout_over = 0;   // requests that asked more than ceil(pages / 32): none
  double seconds = 0;
};

// "4,16" or "4..1000": from the first in steps of four times, and the last. kInvalidArgument: not
// numbers from 1 to 100,000.
absl::StatusOr<std::vector<int>> ParseNodeCounts(std::string_view text);

// kInvalidArgument: no room for a block, or no node.
absl::StatusOr<SimulateRow> Simulate(const BlockTrace& trace, int nodes, size_t capacity_blocks,
                                     int replicas, uint64_t block_bytes);

// One row per number of nodes. kInvalidArgument for bad options, kNotFound without the trace.
absl::StatusOr<std::vector<SimulateRow>> RunSimulateWorkload(const SimulateOptions& options);

}  // namespace crumb::bench
