// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "bench/replay_workload.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <iterator>
#include <memory>
#include <set>
#include <tuple>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "bench/synthetic_traces.h"
#include "common/status_macros.h"
#include "storage/policy/chain_counts.h"
#include "storage/policy/policy.h"

namespace crumb::bench {
namespace {

using storage::ItemHandle;
using storage::ItemInfo;

class BeladyPolicy final : public storage::EvictionPolicy {
 public:
  explicit BeladyPolicy(const BlockTrace& trace) : uses_(trace.distinct()) {
    for (size_t request = 0; request < trace.requests(); ++request) {
      for (const uint32_t block : trace.request(request)) uses_[block].push_back(request);
    }
  }

  std::string_view name() const override { return "belady"; }

  void BeginAccess() override { ++accesses_; }

  ItemHandle Insert(const ItemInfo& info) override {
    const ItemHandle item = free_.empty() ? static_cast<ItemHandle>(states_.size()) : free_.back();
    if (free_.empty()) {
      states_.emplace_back();
    } else {
      free_.pop_back();
    }
    const uint32_t depth = info.parent == storage::kNoItem ? 0 : states_[info.parent].depth + 1;
    states_[item] = {.block = info.fingerprint, .next_use = 0, .depth = depth};
    Queue(item);
    return item;
  }

  // The depth decides which item of a chain is evicted first.
  void SetHasChildren(ItemHandle, bool) override {}

  void Hit(ItemHandle item) override {
    order_.erase(KeyOf(item));
    Queue(item);
  }

  void Remove(ItemHandle item, storage::Removal) override {
    order_.erase(KeyOf(item));
    free_.push_back(item);
  }

  std::optional<ItemHandle> FindVictim(absl::FunctionRef<bool(ItemHandle)> is_pinned,
                                       size_t& steps) override {
    for (auto key = order_.rbegin(); key != order_.rend() && steps > 0; ++key) {
      --steps;
      if (!is_pinned(std::get<2>(*key))) return std::get<2>(*key);
    }
    return std::nullopt;
  }

  storage::PolicyUsage Usage() const override {
    return {.items = order_.size(),
            .ghosts = 0,
            .memory_bytes = states_.capacity() * sizeof(State) + order_.size() * sizeof(Key)};
  }

 private:
  using Key = std::tuple<size_t, uint32_t, ItemHandle>;  // next use, depth, item

  struct State {
    uint64_t block = 0;
    size_t next_use = 0;
    uint32_t depth = 0;
  };

  Key KeyOf(ItemHandle item) const { return {states_[item].next_use, states_[item].depth, item}; }

  // Returns the first use of the item's block after the current access.
  void Queue(ItemHandle item) {
    const std::vector<size_t>& uses = uses_[states_[item].block];
    const auto next = std::lower_bound(uses.begin(), uses.end(), accesses_);
    states_[item].next_use = next == uses.end() ? SIZE_MAX : *next;
    order_.insert(KeyOf(item));
  }

  size_t accesses_ = 0;                    // accesses so far, including the current one
  std::vector<std::vector<size_t>> uses_;  // the requests that use each block
  std::vector<State> states_;              // indexed by handle
  std::vector<ItemHandle> free_;
  std::set<Key> order_;
};

}  // namespace

std::unique_ptr<storage::EvictionPolicy> MakeBeladyPolicy(const BlockTrace& trace) {
  return std::make_unique<BeladyPolicy>(trace);
}

namespace {

using storage::EvictionPolicy;
using storage::ItemHandle;
using storage::kNoItem;

constexpr std::string_view kBelady = "belady";

struct ModelGeometry {
  const char* name;
  int layers;
  int kv_heads;
  int head_dim;
};

// The sizes are those of the models' published config.json.
constexpr std::array kModels = {
    ModelGeometry{"qwen3-0.6b", 28, 8, 128},   ModelGeometry{"qwen3-1.7b", 28, 8, 128},
    ModelGeometry{"qwen3-4b", 36, 8, 128},     ModelGeometry{"qwen3-8b", 36, 8, 128},
    ModelGeometry{"qwen3-14b", 40, 8, 128},    ModelGeometry{"qwen3-32b", 64, 8, 128},
    ModelGeometry{"llama-3.1-8b", 32, 8, 128}, ModelGeometry{"llama-3.1-70b", 80, 8, 128},
};

// A cache of blocks from which a policy evicts.
class ReplayCache {
 public:
  ReplayCache(size_t distinct_blocks, size_t capacity_blocks,
              std::unique_ptr<EvictionPolicy> policy)
      : policy_(std::move(policy)), capacity_(capacity_blocks), handles_(distinct_blocks, kNoItem) {
    blocks_.reserve(std::min(distinct_blocks, capacity_blocks) + 1);
  }

  // Processes a request. Returns how many of its blocks were served.
  size_t Access(std::span<const uint32_t> request) {
    size_t hits = 0;
    while (hits < request.size() && handles_[request[hits]] != kNoItem) ++hits;
    policy_->BeginAccess();
    for (size_t i = request.size(); i-- > 0;) {
      const ItemHandle item = handles_[request[i]];
      if (item != kNoItem) policy_->Hit(item);
    }
    ItemHandle parent = kNoItem;
    for (const uint32_t block : request) {
      if (handles_[block] == kNoItem) Insert(block, parent);
      parent = handles_[block];
    }
    while (resident_ > capacity_) EvictOne();
    return hits;
  }

  size_t evictions() const { return evictions_; }
  size_t policy_bytes() const { return policy_->Usage().memory_bytes; }

 private:
  void Insert(uint32_t block, ItemHandle parent) {
    const ItemHandle item = chains_.Insert(*policy_, {.fingerprint = block, .parent = parent});
    handles_[block] = item;
    if (item >= blocks_.size()) blocks_.resize(item + 1);
    blocks_[item] = block;
    ++resident_;
  }

  void EvictOne() {
    const auto nothing_pinned = [](ItemHandle) { return false; };
    const ItemHandle victim = *policy_->Victim(nothing_pinned);
    handles_[blocks_[victim]] = kNoItem;
    chains_.Remove(*policy_, victim, storage::Removal::kEvicted);
    --resident_;
    ++evictions_;
  }

  std::unique_ptr<EvictionPolicy> policy_;
  storage::ChainCounts chains_;
  size_t capacity_;
  size_t resident_ = 0;
  size_t evictions_ = 0;
  std::vector<ItemHandle> handles_;  // indexed by block; kNoItem if absent
  std::vector<uint32_t> blocks_;     // indexed by handle
};

absl::StatusOr<std::unique_ptr<EvictionPolicy>> MakeReplayPolicy(const BlockTrace& trace,
                                                                 std::string_view name,
                                                                 size_t capacity_blocks) {
  if (name == kBelady) return MakeBeladyPolicy(trace);
  absl::StatusOr<std::unique_ptr<EvictionPolicy>> policy =
      storage::MakePolicy(name, capacity_blocks);
  if (policy.ok()) return policy;
  return absl::InvalidArgumentError(absl::StrCat("unknown replay policy '", std::string(name),
                                                 "'; known are ",
                                                 absl::StrJoin(ReplayPolicyNames(), ", ")));
}

}  // namespace

std::vector<std::string> ReplayModelNames() {
  std::vector<std::string> names;
  names.reserve(std::size(kModels));
  for (const ModelGeometry& model : kModels) names.emplace_back(model.name);
  return names;
}

absl::StatusOr<uint64_t> BytesPerToken(std::string_view model, kernels::PageFormat format) {
  for (const ModelGeometry& known : kModels) {
    if (model != known.name) continue;
    const kernels::TileShape tile{
        .tokens = 64, .head_dim = known.head_dim, .group_size = std::min(known.head_dim, 128)};
    return known.layers * known.kv_heads * tile.bytes(format) / tile.tokens;
  }
  return absl::InvalidArgumentError(absl::StrCat("unknown model '", std::string(model),
                                                 "'; known are ",
                                                 absl::StrJoin(ReplayModelNames(), ", ")));
}

absl::StatusOr<kernels::PageFormat> ParseReplayFormat(std::string_view format) {
  if (format == "bf16") return kernels::PageFormat::kBf16;
  if (format == "int2") return kernels::PageFormat::kInt2;
  return absl::InvalidArgumentError(
      absl::StrCat("unknown format '", std::string(format), "'; known are bf16, int2"));
}

absl::StatusOr<size_t> CapacityBlocks(double capacity_gb, uint64_t bytes_per_token) {
  const double blocks =
      std::floor(capacity_gb * 1e9 / static_cast<double>(kTraceBlockTokens * bytes_per_token));
  if (!(blocks >= 1 && blocks < static_cast<double>(kNoItem))) {
    return absl::InvalidArgumentError(absl::StrCat(
        "a capacity of ", capacity_gb, " GB holds not one block of ",
        kTraceBlockTokens * bytes_per_token, " bytes, or more than ", kNoItem, " of them"));
  }
  return static_cast<size_t>(blocks);
}

std::vector<std::string> ReplayPolicyNames() {
  std::vector<std::string> names = storage::PolicyNames();
  names.emplace_back(kBelady);
  return names;
}

absl::StatusOr<ReplayRow> Replay(const BlockTrace& trace, std::string_view policy,
                                 size_t capacity_blocks) {
  if (capacity_blocks == 0) return absl::InvalidArgumentError("replay needs room for a block");
  CRUMB_ASSIGN_OR_RETURN(std::unique_ptr<EvictionPolicy> made,
                         MakeReplayPolicy(trace, policy, capacity_blocks));
  const auto start = std::chrono::steady_clock::now();
  ReplayCache cache(trace.distinct(), capacity_blocks, std::move(made));
  ReplayRow row;
  row.policy = std::string(policy);
  row.capacity_blocks = capacity_blocks;
  row.requests = trace.requests();
  row.blocks = trace.blocks();
  for (size_t i = 0; i < trace.requests(); ++i) {
    row.hits += cache.Access(trace.request(i));
  }
  row.hit_rate =
      static_cast<double>(row.hits) / static_cast<double>(std::max<size_t>(row.blocks, 1));
  row.evictions = cache.evictions();
  row.policy_bytes = cache.policy_bytes();
  row.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  return row;
}

absl::StatusOr<std::vector<ReplayRow>> RunReplayWorkload(const ReplayOptions& options) {
  CRUMB_ASSIGN_OR_RETURN(const uint64_t bytes_per_token,
                         BytesPerToken(options.model, options.format));
  CRUMB_ASSIGN_OR_RETURN(const BlockTrace trace,
                         LoadTrace(options.trace_path, options.synthetic, options.seed));
  std::vector<ReplayRow> rows;
  for (const double capacity_gb : options.capacities_gb) {
    CRUMB_ASSIGN_OR_RETURN(const size_t capacity_blocks,
                           CapacityBlocks(capacity_gb, bytes_per_token));
    for (const std::string& policy : options.policies) {
      CRUMB_ASSIGN_OR_RETURN(ReplayRow row, Replay(trace, policy, capacity_blocks));
      row.capacity_gb = capacity_gb;
      rows.push_back(std::move(row));
    }
  }
  return rows;
}

}  // namespace crumb::bench
