// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "bench/simulate_workload.h"

#include <algorithm>
#include <charconv>
#include <chrono>
#include <optional>

#include "absl/strings/str_cat.h"
#include "bench/replay_workload.h"
#include "bench/synthetic_traces.h"
#include "common/status_macros.h"

namespace crumb::bench {
namespace {

constexpr int kNodesMax = 100'000;
constexpr int kRangeStep = 4;

HitTimes TimesOf(std::vector<double> seconds) {
  HitTimes times;
  times.requests = seconds.size();
  if (seconds.empty()) return times;
  const auto at = [&](double part) {
    const auto index = static_cast<size_t>(part * static_cast<double>(seconds.size() - 1));
    std::nth_element(seconds.begin(), seconds.begin() + static_cast<std::ptrdiff_t>(index),
                     seconds.end());
    return seconds[index];
  };
  times.p50 = at(0.5);
  times.p99 = at(0.99);
  return times;
}

void FillRow(const SimulatedCluster& cluster, uint64_t block_bytes, SimulateRow& row) {
  const SimulatedCluster::Totals& totals = cluster.totals();
  const auto gb = [&](size_t blocks) { return static_cast<double>(blocks * block_bytes) / 1e9; };
  row.local_hits = totals.local_hits;
  row.remote_hits = totals.remote_hits;
  row.hit_rate = static_cast<double>(row.local_hits + row.remote_hits) /
                 static_cast<double>(std::max<size_t>(row.blocks, 1));
  row.pulled_gb = gb(totals.remote_hits);
  row.pushed_gb = gb(totals.pushed);
  if (totals.remote_hits > 0) {
    const auto remote = static_cast<double>(totals.remote_hits);
    const double mean = remote / static_cast<double>(totals.served.size());
    const size_t most = *std::max_element(totals.served.begin(), totals.served.end());
    row.hottest_load = static_cast<double>(most) / mean;
    row.longest_load = static_cast<double>(totals.longest_pull) / mean;
    row.referred = static_cast<double>(totals.referred) / remote;
  }
  row.one_hop = TimesOf(totals.one_hop);
  row.by_referral = TimesOf(totals.by_referral);
  row.remapped_on_join = cluster.RemappedOnJoin();
  row.remapped_on_leave = cluster.RemappedOnLeave();
  if (totals.asking > 0) {
    row.fanout_mean = static_cast<double>(totals.asked) / static_cast<double>(totals.asking);
  }
  row.fanout_max = totals.fanout_max;
  row.fanout_bound = totals.fanout_bound;
  row.fanout_over = totals.fanout_over;
}

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

absl::StatusOr<SimulateRow> Simulate(const BlockTrace& trace,
                                     const SimulatedCluster::Options& options, double speedup) {
  if (options.nodes < 1 || options.capacity_blocks == 0 || options.replicas < 1) {
    return absl::InvalidArgumentError("simulate needs a node, a replica and room for a block");
  }
  if (options.network.zones < 1 || !(options.network.nic_gbit > 0) || !(speedup > 0)) {
    return absl::InvalidArgumentError(
        "zones, the network cards' rate and speedup must be positive");
  }
  const auto start = std::chrono::steady_clock::now();
  SimulatedCluster cluster(options);
  SimulateRow row;
  row.nodes = options.nodes;
  row.push = options.push;
  row.requests = trace.requests();
  row.blocks = trace.blocks();
  for (size_t i = 0; i < trace.requests(); ++i) {
    cluster.Access(i % static_cast<size_t>(options.nodes), trace.request(i),
                   trace.seconds(i) / speedup);
  }
  FillRow(cluster, options.block_bytes, row);
  row.alone_hit_rate = AloneHitRate(trace, options.nodes, options.capacity_blocks);
  row.one_hit_rate =
      AloneHitRate(trace, 1, options.capacity_blocks * static_cast<size_t>(options.nodes));
  row.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  return row;
}

absl::StatusOr<std::vector<SimulateRow>> RunSimulateWorkload(const SimulateOptions& options) {
  CRUMB_ASSIGN_OR_RETURN(const uint64_t bytes_per_token,
                         BytesPerToken(options.model, options.format));
  SimulatedCluster::Options cluster;
  CRUMB_ASSIGN_OR_RETURN(cluster.capacity_blocks,
                         CapacityBlocks(options.capacity_gb, bytes_per_token));
  CRUMB_ASSIGN_OR_RETURN(const BlockTrace trace,
                         LoadTrace(options.trace_path, options.synthetic, options.seed));
  cluster.replicas = options.replicas;
  cluster.block_bytes = bytes_per_token * kTraceBlockTokens;
  cluster.network = options.network;
  std::vector<SimulateRow> rows;
  for (const SimulatedPush push : options.push) {
    for (const int nodes : options.nodes) {
      cluster.push = push;
      cluster.nodes = nodes;
      CRUMB_ASSIGN_OR_RETURN(SimulateRow row, Simulate(trace, cluster, options.speedup));
      rows.push_back(row);
    }
  }
  return rows;
}

}  // namespace crumb::bench
