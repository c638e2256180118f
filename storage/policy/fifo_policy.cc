// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "storage/policy/policy.h"

#include "storage/policy/chain_table.h"
#include "storage/policy/item_queue.h"

namespace crumb::storage {
namespace {

class FifoPolicy final : public EvictionPolicy {
 public:
  std::string_view name() const override { return "fifo"; }

  void BeginAccess() override {}

  ItemHandle Insert(const ItemInfo& info) override {
    const ItemHandle item = table_.Add(info, /*access=*/0);
    queue_.PushNewest(item);
    return item;
  }

  void SetHasChildren(ItemHandle, bool) override {}

  void Hit(ItemHandle) override {}

  void Remove(ItemHandle item, Removal) override {
    queue_.Remove(item);
    table_.Remove(item);
  }

  std::optional<ItemHandle> FindVictim(absl::FunctionRef<bool(ItemHandle)> is_pinned,
                                       size_t& steps) override {
    for (size_t tried = 0; tried < queue_.size() && steps > 0; ++tried) {
      --steps;
      const ItemHandle item = queue_.oldest();
      if (!is_pinned(item)) return item;
      queue_.Remove(item);
      queue_.PushNewest(item);
    }
    return std::nullopt;
  }

  PolicyUsage Usage() const override {
    return {.items = table_.size(),
            .ghosts = 0,
            .memory_bytes = table_.MemoryBytes() + links_.MemoryBytes()};
  }

 private:
  ChainTable table_;
  ItemLinks links_;
  ItemQueue queue_{links_};
};

}  // namespace

std::unique_ptr<EvictionPolicy> MakeFifoPolicy() { return std::make_unique<FifoPolicy>(); }

}  // namespace crumb::storage
