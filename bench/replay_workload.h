// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "bench/block_trace.h"
#include "kernels/tile.h"
#include "storage/policy/policy.h"

// Workload `replay` computes how much of a trace of prompts a cache of a given size would have
// served. It runs on block ids alone, with the eviction policies of the tiers but without a store.
// docs/replay.md has the rules, the families and the results.
namespace crumb::bench {

// Tokens of one block of a trace.
inline constexpr uint64_t kTraceBlockTokens = 512;

// There is a row for every combination of the members that are lists.
struct ReplayOptions {
  std::string trace_path;                    // one request per line; empty: use `synthetic`
  std::string synthetic;                     // a family of synthetic_traces.h
  uint64_t seed = 1;                         // seed of the family
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
  size_t blocks = 0;  // sum over all requests
  size_t hits = 0;    // blocks that were served
  double hit_rate = 0;
  size_t evictions = 0;
  double seconds = 0;       // time of the whole replay
  size_t policy_bytes = 0;  // memory of the policy at the end
};

// Returns the names of the models whose sizes are known.
std::vector<std::string> ReplayModelNames();

// Returns the bytes of one token in all layers and KV heads. kInvalidArgument: the model is
// unknown; the message lists the known ones.
absl::StatusOr<uint64_t> BytesPerToken(std::string_view model, kernels::PageFormat format);

// Parses `bf16` or `int2`; kInvalidArgument for others.
absl::StatusOr<kernels::PageFormat> ParseReplayFormat(std::string_view format);

// Returns the number of whole blocks of kTraceBlockTokens that fit. kInvalidArgument: none fits.
absl::StatusOr<size_t> CapacityBlocks(double capacity_gb, uint64_t bytes_per_token);

// Returns the names of the tiers' policies, and `belady`.
std::vector<std::string> ReplayPolicyNames();

// Replays `trace` against a cache of `capacity_blocks`. For each request it counts the leading
// blocks that are present, uses or inserts all blocks, and then evicts down to the capacity.
// kInvalidArgument: the policy is unknown or the capacity 0.
absl::StatusOr<ReplayRow> Replay(const BlockTrace& trace, std::string_view policy,
                                 size_t capacity_blocks);

// Returns one row per capacity and policy. kInvalidArgument: an option is wrong; kNotFound: the
// trace does not exist.
absl::StatusOr<std::vector<ReplayRow>> RunReplayWorkload(const ReplayOptions& options);

// Returns the policy `belady`, which is optimal because it knows the trace. It evicts blocks
// without a next use first, then the block whose next use is farthest, on ties the deeper one of a
// chain. REQUIRES: accesses are the trace's requests in order, fingerprints its block ids, and
// `trace` outlives the policy.
std::unique_ptr<storage::EvictionPolicy> MakeBeladyPolicy(const BlockTrace& trace);

}  // namespace crumb::bench
