// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "storage/policy/ghost_list.h"

namespace crumb::storage {

std::optional<Ghost> GhostList::Add(const Ghost& ghost) {
  if (max_ghosts_ == 0) return ghost;
  std::optional<Ghost> dropped;
  if (ring_.size() < max_ghosts_) {
    ring_.push_back(ghost);
    next_ = ring_.size() - 1;
  } else {
    dropped = Free(next_);
    ring_[next_] = ghost;
  }
  place_.insert_or_assign(ghost.fingerprint, static_cast<uint32_t>(next_));
  next_ = (next_ + 1) % max_ghosts_;
  return dropped;
}

std::optional<Ghost> GhostList::Take(uint64_t fingerprint) {
  const auto found = place_.find(fingerprint);
  if (found == place_.end()) return std::nullopt;
  const Ghost ghost = ring_[found->second];
  place_.erase(found);
  return ghost;
}

std::optional<Ghost> GhostList::Free(size_t place) {
  // The place is stale when its ghost was taken, and perhaps added again elsewhere.
  const auto found = place_.find(ring_[place].fingerprint);
  if (found == place_.end() || found->second != place) return std::nullopt;
  place_.erase(found);
  return ring_[place];
}

size_t GhostList::MemoryBytes() const {
  // flat_hash_map: one slot and one control byte per bucket.
  return ring_.capacity() * sizeof(Ghost) +
         place_.capacity() * (sizeof(std::pair<uint64_t, uint32_t>) + 1);
}

}  // namespace crumb::storage
