// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "storage/policy/chain_counts.h"
#include "storage/policy/policy.h"

namespace crumb::storage {

// A cache without contents, which counts the hits that a policy would have had. Not thread-safe.
class ShadowCache {
 public:
  // Holds up to `capacity_items` items, at least one.
  ShadowCache(std::unique_ptr<EvictionPolicy> policy, size_t capacity_items);

  // One access to a chain of fingerprints, its beginning first. Returns how many from the front
  // were present before; all are afterwards, as far as there is room.
  size_t Access(std::span<const uint64_t> chain);

  // Drops an item if it is there.
  void Forget(uint64_t fingerprint);

  size_t MemoryBytes() const;

 private:
  void EvictOne();

  std::unique_ptr<EvictionPolicy> policy_;
  ChainCounts chains_;
  size_t capacity_items_;
  absl::flat_hash_map<uint64_t, ItemHandle> resident_;
  std::vector<uint64_t> fingerprints_;  // indexed by handle
};

}  // namespace crumb::storage
