// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "storage/policy/chain_table.h"

namespace crumb::storage {

ItemHandle ChainTable::Add(const ItemInfo& info, uint64_t access) {
  ItemHandle handle;
  if (free_.empty()) {
    handle = static_cast<ItemHandle>(items_.size());
    items_.emplace_back();
  } else {
    handle = free_.back();
    free_.pop_back();
    items_[handle] = Item();
  }
  items_[handle].fingerprint = info.fingerprint;
  items_[handle].last_access = access;
  if (info.parent != kNoItem) Link(handle, info.parent);
  return handle;
}

void ChainTable::Remove(ItemHandle item) {
  for (ItemHandle child = items_[item].first_child; child != kNoItem;) {
    const ItemHandle next = items_[child].next_sibling;
    items_[child].parent = kNoItem;
    items_[child].next_sibling = kNoItem;
    items_[child].previous_sibling = kNoItem;
    child = next;
  }
  Unlink(item);
  free_.push_back(item);
}

void ChainTable::Link(ItemHandle child, ItemHandle parent) {
  const ItemHandle sibling = items_[parent].first_child;
  items_[child].parent = parent;
  items_[child].next_sibling = sibling;
  if (sibling != kNoItem) items_[sibling].previous_sibling = child;
  items_[parent].first_child = child;
}

void ChainTable::Unlink(ItemHandle child) {
  Item& item = items_[child];
  if (item.parent == kNoItem) return;
  if (item.previous_sibling == kNoItem) {
    items_[item.parent].first_child = item.next_sibling;
  } else {
    items_[item.previous_sibling].next_sibling = item.next_sibling;
  }
  if (item.next_sibling != kNoItem) {
    items_[item.next_sibling].previous_sibling = item.previous_sibling;
  }
  item.parent = kNoItem;
}

size_t ChainTable::MemoryBytes() const {
  return items_.capacity() * sizeof(Item) + free_.capacity() * sizeof(ItemHandle);
}

}  // namespace crumb::storage
