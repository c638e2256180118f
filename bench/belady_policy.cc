// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "bench/belady_policy.h"

#include <algorithm>
#include <set>
#include <tuple>

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

  // The depth says which item of a chain goes first.
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

  // Looks up the first use of the item's block after the current access.
  void Queue(ItemHandle item) {
    const std::vector<size_t>& uses = uses_[states_[item].block];
    const auto next = std::lower_bound(uses.begin(), uses.end(), accesses_);
    states_[item].next_use = next == uses.end() ? SIZE_MAX : *next;
    order_.insert(KeyOf(item));
  }

  size_t accesses_ = 0;                    // begun; the current one has index accesses_ - 1
  std::vector<std::vector<size_t>> uses_;  // requests that use a block, by block
  std::vector<State> states_;              // by handle
  std::vector<ItemHandle> free_;
  std::set<Key> order_;
};

}  // namespace

std::unique_ptr<storage::EvictionPolicy> MakeBeladyPolicy(const BlockTrace& trace) {
  return std::make_unique<BeladyPolicy>(trace);
}

}  // namespace crumb::bench
