// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "absl/container/flat_hash_map.h"

namespace crumb::storage {

// A policy's memory of an item after its eviction.
struct Ghost {
  uint64_t fingerprint = 0;
  uint32_t epoch = 0;  // epoch of its last use, counted by the policy
  uint32_t uses = 0;
};

// The most recently evicted items, at most `max_ghosts` of them; the oldest gives way. About 60
// bytes per ghost. Not thread-safe.
class GhostList {
 public:
  explicit GhostList(size_t max_ghosts) : max_ghosts_(max_ghosts) {}

  // Remembers `ghost`. Returns the one that gave way, if any.
  std::optional<Ghost> Add(const Ghost& ghost);

  // Finds and forgets the ghost of `fingerprint`.
  std::optional<Ghost> Take(uint64_t fingerprint);

  size_t size() const { return place_.size(); }
  size_t MemoryBytes() const;

 private:
  std::optional<Ghost> Free(size_t place);

  size_t max_ghosts_;
  size_t next_ = 0;          // place in ring_ that is overwritten next, once it is full
  std::vector<Ghost> ring_;  // oldest first from next_ on; some were taken since
  absl::flat_hash_map<uint64_t, uint32_t> place_;  // fingerprint -> place in ring_
};

}  // namespace crumb::storage
