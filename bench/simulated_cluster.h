// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <list>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "common/holder_directory.h"
#include "common/placement.h"

// The nodes of `crumb-bench simulate`: caches of blocks, crumbd's placement, and its directory of
// holders. No byte is moved.

namespace crumb::bench {

// The network between simulated nodes.
struct NetworkOptions {
  double rtt_us = 50;         // round trip between nodes of one zone
  double rtt_zones_us = 500;  // round trip between nodes of different zones
  int zones = 3;              // node i is in zone i modulo zones
  double nic_gbit = 100;      // rate of each node, in each direction
};

// Time that messages take between nodes: half a round trip each way, and a queue at each network
// card and direction, first come, first served. Transfers are to be added in the order in which
// requests arrive; of two that overlap, the one that was added first goes first, also if it was
// ready a moment later. Times are in seconds.
class SimulatedNetwork {
 public:
  SimulatedNetwork(size_t nodes, const NetworkOptions& options)
      : options_(options), out_free_(nodes, 0), in_free_(nodes, 0) {}

  double RoundTrip(size_t a, size_t b) const {
    const auto zones = static_cast<size_t>(options_.zones);
    return 1e-6 * (a % zones == b % zones ? options_.rtt_us : options_.rtt_zones_us);
  }

  // Sends bytes that are ready at `ready`. Returns when the last one has arrived.
  double Send(size_t from, size_t to, double ready, uint64_t bytes) {
    const double seconds = static_cast<double>(bytes) * 8 / (options_.nic_gbit * 1e9);
    const double way = RoundTrip(from, to) / 2;
    const double sent_from = std::max(ready, out_free_[from]);
    out_free_[from] = sent_from + seconds;
    const double received_from = std::max(sent_from + way, in_free_[to]);
    in_free_[to] = received_from + seconds;
    return in_free_[to];
  }

 private:
  const NetworkOptions options_;
  std::vector<double> out_free_;  // when each card has sent all that was queued
  std::vector<double> in_free_;   // when it has received all
};

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

// Returns nodes of equal weight, each on a host of its own.
std::vector<PlacementNode> SimulatedNodes(int count);

// The key of a block; the first block of a run names the run.
PageKey BlockKey(uint32_t block);

// The nodes of `simulate` with their caches, the directory of holders and the network between them.
// Blocks have no bytes. Not thread-safe.
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

  // Returns the key of a block, and the homes of a run, which are computed once.
  const PageKey& KeyOf(uint32_t block);
  const std::vector<size_t>& HomesOfRun(uint32_t first_block);
  // Returns how many leading blocks the node has.
  size_t LeadingAt(size_t node, std::span<const uint32_t> blocks) const;
  // Fetches the blocks that the node lacks. Returns the number of leading blocks that are present
  // then, and sets `ended` to the time at which the last one has arrived.
  size_t Pull(size_t node, std::span<const uint32_t> request, size_t hits, double now,
              double* ended);
  // Counts the nodes that the request contacts.
  void CountFanout(size_t node, std::span<const uint32_t> request, size_t hits);
  // Asks the homes of a run and returns the node with the longest prefix of `wanted`: a home, or a
  // holder that a home referred to. AskHome does so for one home.
  Source FindSource(size_t node, uint32_t run, std::span<const uint32_t> wanted, double now);
  Source AskHome(size_t node, size_t home, std::span<const uint32_t> wanted, double now);
  // Notes a holder of blocks in the directories of the run's homes.
  void Note(size_t holder, uint32_t run, std::span<const uint32_t> blocks);
  // Gives computed blocks to the homes of their runs, as the policy says.
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
