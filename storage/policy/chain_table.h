// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "storage/policy/chunked_vector.h"
#include "storage/policy/policy.h"

namespace crumb::storage {

// The resident items of a policy: the identity of each, its last access, and whether it has
// children. Assigns handles. Every call is O(1). Not thread-safe.
class ChainTable {
 public:
  struct Item {
    uint64_t fingerprint = 0;
    uint64_t last_access = 0;
    bool has_children = false;
  };

  // Adds an item used by `access`.
  ItemHandle Add(const ItemInfo& info, uint64_t access) {
    auto handle = static_cast<ItemHandle>(items_.size());
    if (free_.empty()) {
      items_.Append();
    } else {
      handle = free_.back();
      free_.pop_back();
    }
    items_[handle] = {
        .fingerprint = info.fingerprint, .last_access = access, .has_children = info.has_children};
    return handle;
  }
  // Frees the handle of `item`.
  void Remove(ItemHandle item) { free_.push_back(item); }

  const Item& operator[](ItemHandle item) const { return items_[item]; }
  void Touch(ItemHandle item, uint64_t access) { items_[item].last_access = access; }
  void SetHasChildren(ItemHandle item, bool has_children) {
    items_[item].has_children = has_children;
  }
  bool IsLeaf(ItemHandle item) const { return !items_[item].has_children; }

  size_t size() const { return items_.size() - free_.size(); }
  // Handles given out so far are below this.
  size_t handle_end() const { return items_.size(); }
  size_t MemoryBytes() const {
    return items_.MemoryBytes() + free_.capacity() * sizeof(ItemHandle);
  }

 private:
  ChunkedVector<Item> items_;     // indexed by handle
  std::vector<ItemHandle> free_;  // handles to use again, last freed first
};

}  // namespace crumb::storage
