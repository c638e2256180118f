// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "storage/policy/chunked_vector.h"
#include "storage/policy/policy.h"

namespace crumb::storage {

// Counts resident children for the user of a policy whose items are all inserted after their
// parents, and reports to the policy which items have any. Not thread-safe.
class ChainCounts {
 public:
  // Inserts an item below info.parent, which is resident or kNoItem.
  ItemHandle Insert(EvictionPolicy& policy, const ItemInfo& info) {
    const ItemHandle item = policy.Insert(info);
    entries_.GrowTo(item + size_t{1});
    Entry& entry = entries_[item];
    entry.serial = ++last_serial_;
    entry.children = 0;
    entry.parent = info.parent;
    if (info.parent == kNoItem) return item;
    Entry& parent = entries_[info.parent];
    entry.parent_serial = parent.serial;
    if (++parent.children == 1) policy.SetHasChildren(info.parent, true);
    return item;
  }

  void Remove(EvictionPolicy& policy, ItemHandle item, Removal reason) {
    Entry& entry = entries_[item];
    policy.Remove(item, reason);
    entry.serial = 0;  // its children have no parent from here on
    if (entry.parent == kNoItem) return;
    Entry& parent = entries_[entry.parent];
    if (parent.serial != entry.parent_serial || --parent.children > 0) return;
    policy.SetHasChildren(entry.parent, false);
  }

  size_t MemoryBytes() const { return entries_.MemoryBytes(); }

 private:
  struct Entry {
    uint64_t serial = 0;  // serial number of the item that has the handle; 0 if it is unused
    uint64_t parent_serial = 0;
    ItemHandle parent = kNoItem;
    uint32_t children = 0;
  };

  ChunkedVector<Entry> entries_;  // indexed by handle
  uint64_t last_serial_ = 0;
};

}  // namespace crumb::storage
