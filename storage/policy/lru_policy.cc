// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "storage/policy/policy.h"

#include "storage/policy/chain_table.h"
#include "storage/policy/chunked_vector.h"
#include "storage/policy/item_queue.h"

namespace crumb::storage {
namespace {

class LruPolicy final : public EvictionPolicy {
 public:
  std::string_view name() const override { return "lru"; }

  void BeginAccess() override { ++access_; }

  ItemHandle Insert(const ItemInfo& info) override {
    const ItemHandle item = table_.Add(info, access_);
    if (info.parent != kNoItem && table_[info.parent].last_access == access_) {
      queue_.PushBehind(item, info.parent);
    } else {
      queue_.PushNewest(item);
    }
    passed_over_.GrowTo(table_.handle_end());
    passed_over_[item] = false;
    return item;
  }

  void SetHasChildren(ItemHandle item, bool has_children) override {
    table_.SetHasChildren(item, has_children);
    // A parent that was passed over for its children's sake is as old as the last of them.
    if (has_children || !passed_over_[item]) return;
    queue_.Remove(item);
    queue_.PushOldest(item);
    passed_over_[item] = false;
  }

  void Hit(ItemHandle item) override {
    table_.Touch(item, access_);
    MakeNewest(item);
    passed_over_[item] = false;
  }

  void Remove(ItemHandle item, Removal) override {
    queue_.Remove(item);
    table_.Remove(item);
  }

  std::optional<ItemHandle> FindVictim(absl::FunctionRef<bool(ItemHandle)> is_pinned,
                                       size_t& steps) override {
    for (size_t tried = 0; tried < queue_.size() && steps > 0; ++tried) {
      --steps;
      const ItemHandle item = queue_.oldest();
      const bool has_children = !table_.IsLeaf(item);
      if (!has_children && !is_pinned(item)) return item;
      passed_over_[item] = has_children;
      MakeNewest(item);
    }
    return std::nullopt;
  }

  PolicyUsage Usage() const override {
    return {
        .items = table_.size(),
        .ghosts = 0,
        .memory_bytes = table_.MemoryBytes() + links_.MemoryBytes() + passed_over_.MemoryBytes()};
  }

 private:
  void MakeNewest(ItemHandle item) {
    queue_.Remove(item);
    queue_.PushNewest(item);
  }

  uint64_t access_ = 0;
  ChainTable table_;
  ItemLinks links_;
  ItemQueue queue_{links_};
  // Indexed by handle: whether the item was the oldest while it had children.
  ChunkedVector<bool> passed_over_;
};

}  // namespace

std::unique_ptr<EvictionPolicy> MakeLruPolicy() { return std::make_unique<LruPolicy>(); }

}  // namespace crumb::storage
