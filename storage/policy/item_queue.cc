// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "storage/policy/item_queue.h"

namespace crumb::storage {

void ItemQueue::PushNewest(ItemHandle item) { Insert(item, kNoItem, newest_); }

void ItemQueue::PushOldest(ItemHandle item) { Insert(item, oldest_, kNoItem); }

void ItemQueue::PushBehind(ItemHandle item, ItemHandle newer) {
  Insert(item, newer, links_[newer].older);
}

void ItemQueue::Remove(ItemHandle item) {
  const ItemLinks::Link link = links_[item];
  (link.newer == kNoItem ? newest_ : links_[link.newer].older) = link.older;
  (link.older == kNoItem ? oldest_ : links_[link.older].newer) = link.newer;
  links_[item] = ItemLinks::Link();
  --size_;
}

void ItemQueue::TakeAll(ItemQueue& other) {
  if (other.size_ == 0) return;
  (newest_ == kNoItem ? oldest_ : links_[newest_].newer) = other.oldest_;
  links_[other.oldest_].older = newest_;
  newest_ = other.newest_;
  size_ += other.size_;
  other.newest_ = other.oldest_ = kNoItem;
  other.size_ = 0;
}

void ItemQueue::Insert(ItemHandle item, ItemHandle newer, ItemHandle older) {
  links_[item] = {newer, older};
  (newer == kNoItem ? newest_ : links_[newer].older) = item;
  (older == kNoItem ? oldest_ : links_[older].newer) = item;
  ++size_;
}

}  // namespace crumb::storage
