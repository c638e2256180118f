// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>

#include "storage/policy/chunked_vector.h"
#include "storage/policy/policy.h"

namespace crumb::storage {

// The links of doubly linked queues over item handles. Queues that share one ItemLinks share its
// memory; an item is in one of them at most.
class ItemLinks {
 public:
  struct Link {
    ItemHandle newer = kNoItem;
    ItemHandle older = kNoItem;
  };

  Link& operator[](ItemHandle item) {
    links_.GrowTo(item + size_t{1});
    return links_[item];
  }
  const Link& operator[](ItemHandle item) const { return links_[item]; }
  size_t MemoryBytes() const { return links_.MemoryBytes(); }

 private:
  ChunkedVector<Link> links_;
};

// A queue from newest to oldest. Every call is O(1).
class ItemQueue {
 public:
  explicit ItemQueue(ItemLinks& links) : links_(links) {}
  ItemQueue(const ItemQueue&) = delete;
  ItemQueue& operator=(const ItemQueue&) = delete;

  ItemHandle oldest() const { return oldest_; }
  ItemHandle newest() const { return newest_; }
  // The next newer item, kNoItem after the newest.
  ItemHandle NewerThan(ItemHandle item) const { return links_[item].newer; }
  size_t size() const { return size_; }

  void PushNewest(ItemHandle item);
  void PushOldest(ItemHandle item);
  // Puts `item` right behind `newer`, which is in this queue.
  void PushBehind(ItemHandle item, ItemHandle newer);
  void Remove(ItemHandle item);
  // Moves all items of `other`, in their order, to the newest end of this queue.
  void TakeAll(ItemQueue& other);

 private:
  void Insert(ItemHandle item, ItemHandle newer, ItemHandle older);

  ItemLinks& links_;
  ItemHandle newest_ = kNoItem;
  ItemHandle oldest_ = kNoItem;
  size_t size_ = 0;
};

}  // namespace crumb::storage
