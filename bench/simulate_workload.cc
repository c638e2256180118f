// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "bench/simulate_workload.h"

#include <algorithm>
#include <charconv>
#include <chrono>
#include <list>
#include <optional>
#include <set>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_cat.h"
#include "bench/replay_workload.h"
#include "bench/synthetic_traces.h"
#include "common/placement.h"
#include "common/sha256.h"
#include "common/status_macros.h"

namespace crumb::bench {
namespace {

constexpr size_t kBlockPages = kTraceBlockTokens / kPageTokens;
constexpr size_t kRunBlocks = kRunPages / kBlockPages;
static_assert(kRunBlocks * kBlockPages == kRunPages);
constexpr int kNodesMax = 100'000;
constexpr int kRangeStep = 4;

// The blocks of one node; the least recently used one is at the end.
class NodeCache {
 public:
  bool Has(uint32_t block) const { return places_.contains(block); }

  void Use(uint32_t block, size_t capacity) {
    const auto found = places_.find(block);
    if (found != places_.end()) {
      order_.splice(order_.begin(), order_, found->second);
      return;
    }
    order_.push_front(block);
    places_[block] = order_.begin();
    if (order_.size() <= capacity) return;
    places_.erase(order_.back());
    order_.pop_back();
  }

 private:
  std::list<uint32_t> order_;
  absl::flat_hash_map<uint32_t, std::list<uint32_t>::iterator> places_;
};

std::vector<PlacementNode> MakeNodes(int count) {
  std::vector<PlacementNode> nodes(static_cast<size_t>(count));
  for (int i = 0; i < count; ++i) {
    PlacementNode& node = nodes[static_cast<size_t>(i)];
    node.id = absl::StrCat("node-", i);
    node.host = node.id;
    node.digest = NodeDigest(node.id);
  }
  return nodes;
}

PageKey RunKey(uint32_t first_block) {
  PageKey key;
  key.bytes = Sha256(absl::StrCat("block ", first_block));
  return key;
}

class Homes {
 public:
  Homes(std::vector<PlacementNode> nodes, int replicas)
      : nodes_(std::move(nodes)), replicas_(static_cast<size_t>(replicas)) {}

  // Returns the homes of the page run that begins with this block.
  const std::vector<size_t>& Of(uint32_t first_block) {
    const auto [entry, is_new] = homes_.try_emplace(first_block);
    if (is_new) entry->second = HomesOf(nodes_, RunKey(first_block), replicas_);
    return entry->second;
  }
  const absl::flat_hash_map<uint32_t, std::vector<size_t>>& all() const { return homes_; }
  const std::vector<PlacementNode>& nodes() const { return nodes_; }

 private:
  const std::vector<PlacementNode> nodes_;
  const size_t replicas_;
  absl::flat_hash_map<uint32_t, std::vector<size_t>> homes_;
};

// The nodes of a cluster, which process requests one after the other.
class SimulatedCluster {
 public:
  SimulatedCluster(int nodes, size_t capacity_blocks, int replicas)
      : caches_(static_cast<size_t>(nodes)),
        served_(static_cast<size_t>(nodes), 0),
        capacity_(capacity_blocks),
        homes_(MakeNodes(nodes), replicas) {}

  void Access(size_t node, std::span<const uint32_t> request, SimulateRow& row) {
    NodeCache& cache = caches_[node];
    size_t hits = 0;
    while (hits < request.size() && cache.Has(request[hits])) ++hits;
    row.local_hits += hits;
    hits = Pull(node, request, hits, row);
    for (size_t i = request.size(); i-- > 0;) cache.Use(request[i], capacity_);
    for (size_t i = hits; i < request.size(); ++i) {
      for (const size_t home : homes_.Of(request[i / kRunBlocks * kRunBlocks])) {
        if (home == node) continue;
        if (!caches_[home].Has(request[i])) ++pushed_;
        caches_[home].Use(request[i], capacity_);
      }
    }
  }

  void Finish(uint64_t block_bytes, SimulateRow& row) const {
    row.pulled_gb = static_cast<double>(row.remote_hits * block_bytes) / 1e9;
    row.pushed_gb = static_cast<double>(pushed_ * block_bytes) / 1e9;
    const size_t most = *std::max_element(served_.begin(), served_.end());
    const double mean = static_cast<double>(row.remote_hits) / static_cast<double>(served_.size());
    row.hottest_load = mean > 0 ? static_cast<double>(most) / mean : 0;
    row.fanout_mean = asking_ > 0 ? static_cast<double>(asked_) / static_cast<double>(asking_) : 0;
    FindRemapped(row);
  }

 private:
  // Fetches from the homes of every run that lacks blocks. Returns how many leading blocks are
  // present then.
  size_t Pull(size_t node, std::span<const uint32_t> request, size_t hits, SimulateRow& row) {
    if (hits == request.size()) return hits;
    std::set<size_t> asked;
    for (size_t run = hits / kRunBlocks; run * kRunBlocks < request.size(); ++run) {
      for (const size_t home : homes_.Of(request[run * kRunBlocks])) {
        if (home != node) asked.insert(home);
      }
    }
    asked_ += asked.size();
    if (!asked.empty()) ++asking_;
    const size_t pages = (request.size() - hits) * kBlockPages + hits % kRunBlocks * kBlockPages;
    const size_t bound = (pages + kRunPages - 1) / kRunPages;
    if (asked.size() > bound * homes_.Of(request[0]).size()) ++row.fanout_over;
    row.fanout_max = std::max(row.fanout_max, asked.size());
    row.fanout_bound = std::max(row.fanout_bound, bound);
    for (; hits < request.size(); ++hits) {
      const uint32_t block = request[hits];
      if (caches_[node].Has(block)) {  // the node is its home
        ++row.local_hits;
        continue;
      }
      const std::vector<size_t>& homes = homes_.Of(request[hits / kRunBlocks * kRunBlocks]);
      const auto holder = std::find_if(homes.begin(), homes.end(), [&](size_t home) {
        return home != node && caches_[home].Has(block);
      });
      if (holder == homes.end()) break;
      caches_[*holder].Use(block, capacity_);
      ++served_[*holder];
      ++row.remote_hits;
    }
    return hits;
  }

  // Placement is a pure function, so the effect of a change can be counted without making it.
  void FindRemapped(SimulateRow& row) const {
    std::vector<PlacementNode> joined = homes_.nodes();
    joined.push_back(MakeNodes(static_cast<int>(joined.size()) + 1).back());
    std::vector<PlacementNode> left(homes_.nodes().begin(), homes_.nodes().end() - 1);
    size_t moved_by_join = 0, moved_by_leave = 0;
    for (const auto& [block, homes] : homes_.all()) {
      const std::string& home = homes_.nodes()[homes[0]].id;
      if (joined[HomesOf(joined, RunKey(block), 1).at(0)].id != home) ++moved_by_join;
      if (left.empty() || left[HomesOf(left, RunKey(block), 1).at(0)].id != home) ++moved_by_leave;
    }
    const double runs = static_cast<double>(std::max<size_t>(homes_.all().size(), 1));
    row.remapped_on_join = static_cast<double>(moved_by_join) / runs;
    row.remapped_on_leave = static_cast<double>(moved_by_leave) / runs;
  }

  std::vector<NodeCache> caches_;
  std::vector<size_t> served_;  // blocks served to other nodes
  const size_t capacity_;
  Homes homes_;
  size_t pushed_ = 0;
  size_t asked_ = 0;
  size_t asking_ = 0;
};

// Runs the trace over nodes that share nothing.
double AloneHitRate(const BlockTrace& trace, int nodes, size_t capacity_blocks) {
  std::vector<NodeCache> caches(static_cast<size_t>(nodes));
  size_t hits = 0;
  for (size_t i = 0; i < trace.requests(); ++i) {
    NodeCache& cache = caches[i % caches.size()];
    const auto request = trace.request(i);
    size_t prefix = 0;
    while (prefix < request.size() && cache.Has(request[prefix])) ++prefix;
    hits += prefix;
    for (size_t block = request.size(); block-- > 0;) cache.Use(request[block], capacity_blocks);
  }
  return static_cast<double>(hits) / static_cast<double>(std::max<size_t>(trace.blocks(), 1));
}

std::optional<int> Number(std::string_view text) {
  int number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  if (number < 1 || number > kNodesMax) return std::nullopt;
  return number;
}

absl::StatusOr<BlockTrace> LoadTrace(const SimulateOptions& options) {
  if (options.trace_path.empty() == options.synthetic.empty()) {
    return absl::InvalidArgumentError("simulate takes either a trace or a synthetic family");
  }
  if (!options.trace_path.empty()) return ReadTraceFile(options.trace_path);
  return MakeSyntheticTrace(options.synthetic, options.seed);
}

}  // namespace

absl::StatusOr<std::vector<int>> ParseNodeCounts(std::string_view text) {
  const auto wrong = [&] {
    return absl::InvalidArgumentError(
        absl::StrCat("'", std::string(text),
                     "' is no list like 4,16 nor a range like 4..1000 of numbers from "
                     "1 to ",
                     kNodesMax));
  };
  std::vector<int> counts;
  const size_t dots = text.find("..");
  if (dots != std::string_view::npos) {
    const auto first = Number(text.substr(0, dots));
    const auto last = Number(text.substr(dots + 2));
    if (!first || !last || *first > *last) return wrong();
    for (int count = *first; count < *last; count *= kRangeStep) counts.push_back(count);
    counts.push_back(*last);
    return counts;
  }
  while (true) {
    const size_t comma = text.find(',');
    const auto count = Number(text.substr(0, comma));
    if (!count) return wrong();
    counts.push_back(*count);
    if (comma == std::string_view::npos) return counts;
    text.remove_prefix(comma + 1);
  }
}

absl::StatusOr<SimulateRow> Simulate(const BlockTrace& trace, int nodes, size_t capacity_blocks,
                                     int replicas, uint64_t block_bytes) {
  if (nodes < 1 || capacity_blocks == 0 || replicas < 1) {
    return absl::InvalidArgumentError("simulate needs a node, a replica and room for a block");
  }
  const auto start = std::chrono::steady_clock::now();
  SimulatedCluster cluster(nodes, capacity_blocks, replicas);
  SimulateRow row;
  row.nodes = nodes;
  row.requests = trace.requests();
  row.blocks = trace.blocks();
  for (size_t i = 0; i < trace.requests(); ++i) {
    cluster.Access(i % static_cast<size_t>(nodes), trace.request(i), row);
  }
  cluster.Finish(block_bytes, row);
  row.hit_rate = static_cast<double>(row.local_hits + row.remote_hits) /
                 static_cast<double>(std::max<size_t>(row.blocks, 1));
  row.alone_hit_rate = AloneHitRate(trace, nodes, capacity_blocks);
  row.one_hit_rate = AloneHitRate(trace, 1, capacity_blocks * static_cast<size_t>(nodes));
  row.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  return row;
}

absl::StatusOr<std::vector<SimulateRow>> RunSimulateWorkload(const SimulateOptions& options) {
  CRUMB_ASSIGN_OR_RETURN(const uint64_t bytes_per_token,
                         BytesPerToken(options.model, options.format));
  CRUMB_ASSIGN_OR_RETURN(const size_t capacity_blocks,
                         CapacityBlocks(options.capacity_gb, bytes_per_token));
  CRUMB_ASSIGN_OR_RETURN(const BlockTrace trace, LoadTrace(options));
  std::vector<SimulateRow> rows;
  for (const int nodes : options.nodes) {
    CRUMB_ASSIGN_OR_RETURN(SimulateRow row,
                           Simulate(trace, nodes, capacity_blocks, options.replicas,
                                    bytes_per_token * kTraceBlockTokens));
    rows.push_back(row);
  }
  return rows;
}

}  // namespace crumb::bench
