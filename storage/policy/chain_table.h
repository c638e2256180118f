// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "storage/policy/policy.h"

namespace crumb::storage {

// The resident items of a policy and how they hang together: parents, children, and the access that
// used each last. Hands out handles. Not thread-safe.
class ChainTable {
 public:
  struct Item {
    uint64_t fingerprint = 0;
    uint64_t last_access = 0;
    ItemHandle parent = kNoItem;
    ItemHandle first_child = kNoItem;
    ItemHandle next_sibling = kNoItem;
    ItemHandle previous_sibling = kNoItem;
  };

  // Adds an item used by `access`, below info.parent if it has one.
  ItemHandle Add(const ItemInfo& info, uint64_t access);

  // Unlinks `item` from its parent and children and frees its handle.
  void Remove(ItemHandle item);

  // Hangs `child`, which has no parent, below `parent`.
  void Link(ItemHandle child, ItemHandle parent);

  const Item& operator[](ItemHandle item) const { return items_[item]; }
  void Touch(ItemHandle item, uint64_t access) { items_[item].last_access = access; }
  bool IsLeaf(ItemHandle item) const { return items_[item].first_child == kNoItem; }

  size_t size() const { return items_.size() - free_.size(); }
  // Handles given out so far are below this.
  size_t handle_end() const { return items_.size(); }
  size_t MemoryBytes() const;

 private:
  void Unlink(ItemHandle child);

  std::vector<Item> items_;       // by handle
  std::vector<ItemHandle> free_;  // handles to use again, last freed first
};

}  // namespace crumb::storage
