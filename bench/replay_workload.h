// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "bench/block_trace.h"
#include "kernels/tile.h"

// Workload `replay`: how much of a trace of prompts a cache of so many bytes would have served.
// Runs on block ids alone: the tier's own policy code, no store. Rules, families and results are
// docs/replay.md.
namespace crumb::bench {

inline constexpr uint64_t kTraceBlockTokens = 512;

// What a replay does; each member that is a list multiplies the rows.
struct ReplayOptions {
  std::string trace_path;                    // one request per line; empty: `synthetic`
  std::string synthetic;                     // a family of synthetic_traces.h
  uint64_t seed = 1;                         // of the family
  std::vector<double> capacities_gb = {64};  // 1e9 bytes
  kernels::PageFormat format = kernels::PageFormat::kInt2;
  std::string model = "qwen3-8b";
  std::vector<std::string> policies = {"default"};  // ReplayPolicyNames()
};

struct ReplayRow {
  std::string policy;
  double capacity_gb = 0;
  size_t capacity_blocks = 0;
  size_t requests = 0;
  size_t blocks = 0;  // of all requests
  size_t hits = 0;    // blocks served
  double hit_rate = 0;
  size_t evictions = 0;
  double seconds = 0;       // of the whole replay
  size_t policy_bytes = 0;  // memory of the policy at the end
};

// Names of the models whose sizes are known.
std::vector<std::string> ReplayModelNames();

// Bytes that one token takes in all layers and KV heads. kInvalidArgument for an unknown model,
// listing the known ones.
absl::StatusOr<uint64_t> BytesPerToken(std::string_view model, kernels::PageFormat format);

// kInvalidArgument unless it is `bf16` or `int2`.
absl::StatusOr<kernels::PageFormat> ParseReplayFormat(std::string_view format);

// Whole blocks of kTraceBlockTokens that fit. kInvalidArgument when not one does.
absl::StatusOr<size_t> CapacityBlocks(double capacity_gb, uint64_t bytes_per_token);

// The tiers' policies and `belady`, which knows the future.
std::vector<std::string> ReplayPolicyNames();

// Replays `trace` against a cache of `capacity_blocks`. Per request: counts the blocks from the
// front that are present up to the first absent one, then uses or inserts all of its blocks, then
// evicts down to the capacity. kInvalidArgument for an unknown policy or no capacity.
absl::StatusOr<ReplayRow> Replay(const BlockTrace& trace, std::string_view policy,
                                 size_t capacity_blocks);

// One row per capacity and policy. kInvalidArgument for bad options, kNotFound without the trace.
absl::StatusOr<std::vector<ReplayRow>> RunReplayWorkload(const ReplayOptions& options);

}  // namespace crumb::bench
