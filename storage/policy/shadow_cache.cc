// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "storage/policy/shadow_cache.h"

#include <algorithm>
#include <utility>

namespace crumb::storage {

ShadowCache::ShadowCache(std::unique_ptr<EvictionPolicy> policy, size_t capacity_items)
    : policy_(std::move(policy)), capacity_items_(std::max<size_t>(capacity_items, 1)) {}

size_t ShadowCache::Access(std::span<const uint64_t> chain) {
  policy_->BeginAccess();
  size_t hits = 0;
  while (hits < chain.size() && resident_.contains(chain[hits])) ++hits;
  for (size_t i = chain.size(); i-- > 0;) {
    const auto found = resident_.find(chain[i]);
    if (found != resident_.end()) policy_->Hit(found->second);
  }
  ItemHandle parent = kNoItem;
  for (const uint64_t fingerprint : chain) {
    const auto [place, absent] = resident_.try_emplace(fingerprint, kNoItem);
    if (absent) {
      const ItemHandle item =
          chains_.Insert(*policy_, {.fingerprint = fingerprint, .parent = parent});
      place->second = item;
      if (item >= fingerprints_.size()) fingerprints_.resize(item + 1);
      fingerprints_[item] = fingerprint;
    }
    parent = place->second;
  }
  while (resident_.size() > capacity_items_) EvictOne();
  return hits;
}

void ShadowCache::Forget(uint64_t fingerprint) {
  const auto found = resident_.find(fingerprint);
  if (found == resident_.end()) return;
  chains_.Remove(*policy_, found->second, Removal::kDeleted);
  resident_.erase(found);
}

void ShadowCache::EvictOne() {
  // Nothing is pinned and chains have an end, so there is a victim.
  const ItemHandle victim = *policy_->Victim([](ItemHandle) { return false; });
  resident_.erase(fingerprints_[victim]);
  chains_.Remove(*policy_, victim, Removal::kEvicted);
}

size_t ShadowCache::MemoryBytes() const {
  return policy_->Usage().memory_bytes + chains_.MemoryBytes() +
         fingerprints_.capacity() * sizeof(uint64_t) +
         resident_.capacity() * (sizeof(std::pair<uint64_t, ItemHandle>) + 1);
}

}  // namespace crumb::storage
