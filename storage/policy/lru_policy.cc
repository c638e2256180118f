// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "storage/policy/lru_policy.h"

#include "storage/policy/chain_table.h"
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
    passed_over_.resize(table_.handle_end());
    passed_over_[item] = false;
    return item;
  }

  void Link(ItemHandle child, ItemHandle parent) override { table_.Link(child, parent); }

  void Hit(ItemHandle item) override {
    table_.Touch(item, access_);
    MakeNewest(item);
    passed_over_[item] = false;
  }

  void Remove(ItemHandle item, Removal) override {
    const ItemHandle parent = table_[item].parent;
    queue_.Remove(item);
    table_.Remove(item);
    // A parent that was passed over for its children's sake is as old as the last of them.
    if (parent != kNoItem && passed_over_[parent] && table_.IsLeaf(parent)) {
      queue_.Remove(parent);
      queue_.PushOldest(parent);
      passed_over_[parent] = false;
    }
  }

  std::optional<ItemHandle> Victim(absl::FunctionRef<bool(ItemHandle)> is_pinned) override {
    for (size_t tried = 0; tried < queue_.size(); ++tried) {
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
        .memory_bytes = table_.MemoryBytes() + links_.MemoryBytes() + passed_over_.capacity() / 8};
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
  std::vector<bool> passed_over_;  // by handle: was oldest while it had children
};

}  // namespace

std::unique_ptr<EvictionPolicy> MakeLruPolicy() { return std::make_unique<LruPolicy>(); }

}  // namespace crumb::storage
