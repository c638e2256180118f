// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <list>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "bench/simulated_network.h"
#include "common/holder_directory.h"
#include "common/placement.h"

// The nodes of `crumb-bench simulate`: caches of blocks, crumbd's placement, and its directory of
// holders. No byte is moved.
namespace crumb::bench {

// The policy for copies at homes: cluster.push.
enum class SimulatedPush : uint8_t { kAlways, kReused };

// The blocks of one node; the least recently used one is at the end.
class NodeCache {
 public:
  bool Has(uint32_t block) const { return places_.contains(block); }
  void Use(uint32_t block, size_t capacity);

 private:
  std::list<uint32_t> order_;
  absl::flat_hash_map<uint32_t, std::list<uint32_t>::iterator> places_;
};

std::vector<PlacementNode> SimulatedNodes(int count);

// The key of a block; the first block of a run names the run.
PageKey BlockKey(uint32_t block);

class SimulatedCluster {
 public:
  struct Options {
    int nodes = 1;
    size_t capacity_blocks = 1;  // capacity of each node
    int replicas = 1;
    SimulatedPush push = SimulatedPush::kAlways;
    uint64_t block_bytes = 0;
    NetworkOptions network;
  };
  struct Totals {
    size_t local_hits = 0;  // blocks
    size_t remote_hits = 0;
    size_t pushed = 0;
    size_t referred = 0;      // blocks that a home referred their reader to another node for
    size_t longest_pull = 0;  // blocks that one request got from one node
    size_t asked = 0;         // homes, of all requests that ask any
    size_t asking = 0;        // requests that ask homes
    size_t fanout_max = 0;
    size_t fanout_bound = 0;
    size_t fanout_over = 0;
    std::vector<size_t> served;       // blocks, by node
    std::vector<double> one_hop;      // seconds until all hits of a request were there: from homes
    std::vector<double> by_referral;  // the same where a home referred to another node
  };

  explicit SimulatedCluster(const Options& options);

  // A request arrives at `node`, `now` seconds after the start.
  void Access(size_t node, std::span<const uint32_t> request, double now);

  const Totals& totals() const { return totals_; }
  // Fraction of runs whose home changes when a node joins, or leaves.
  double RemappedOnJoin() const;
  double RemappedOnLeave() const;

 private:
  // A part of a run that a node serves.
  struct Source {
    size_t node = 0;
    size_t blocks = 0;
    double ready = 0;  // when it begins to send
    bool referred = false;
  };

  const PageKey& KeyOf(uint32_t block);
  const std::vector<size_t>& HomesOfRun(uint32_t first_block);
  size_t LeadingAt(size_t node, std::span<const uint32_t> blocks) const;
  // Fetches the blocks that the node lacks. Returns the number of leading blocks that are present
  // then, and sets `ended` to the time at which the last one has arrived.
  size_t Pull(size_t node, std::span<const uint32_t> request, size_t hits, double now,
              double* ended);
  void CountFanout(size_t node, std::span<const uint32_t> request, size_t hits);
  Source FindSource(size_t node, uint32_t run, std::span<const uint32_t> wanted, double now);
  Source AskHome(size_t node, size_t home, std::span<const uint32_t> wanted, double now);
  void Note(size_t holder, uint32_t run, std::span<const uint32_t> blocks);
  void Push(size_t node, std::span<const uint32_t> request, size_t hits, double now);
  double Remapped(const std::vector<PlacementNode>& nodes) const;

  const Options options_;
  const std::vector<PlacementNode> nodes_;
  std::vector<NodeCache> caches_;
  std::vector<std::unique_ptr<HolderDirectory>> directories_;  // indexed by home
  SimulatedNetwork network_;
  absl::flat_hash_map<uint32_t, std::vector<size_t>> homes_;  // keyed by the first block of a run
  absl::flat_hash_map<std::string, size_t> numbers_;          // node numbers, keyed by id
  std::vector<PageKey> keys_;  // keys of blocks; zeros if not made yet
  Totals totals_;
};

}  // namespace crumb::bench
