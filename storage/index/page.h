// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "absl/container/inlined_vector.h"
#include "common/clock.h"
#include "common/page_key.h"
#include "storage/coverage.h"
#include "storage/fragment_tier.h"
#include "storage/index/held_bytes.h"
#include "storage/index/key_index.h"
#include "storage/index/page_forest.h"
#include "storage/policy/policy.h"
#include "storage/slot_allocator.h"

namespace crumb::storage {

// Names a page of a PageTable, from Insert until it is removed and has no references. Handles are
// dense: that of a page that is gone is used again.
using PageHandle = uint32_t;
inline constexpr PageHandle kNoPage = UINT32_MAX;

// The state, in the tier below, of a fragment in host memory:
//   kAbsent -> kQueued   the fragment is queued for writing
//   kQueued -> kStored   the write is durable
//   kQueued -> kAbsent   the write failed, or the queue had no room left
//   kQueued -> kRefused  the tier below refused the fragment for good: its size, its generation
//   kStored -> kAbsent   the tier below evicted or lost the page
enum class Below : uint8_t {
  kAbsent,   // the tier below does not have the fragment
  kQueued,   // the fragment waits to be written, and the queue refers to its page
  kStored,   // the fragment is durable
  kRefused,  // the tier below can never store the fragment, or does not exist
};

struct Fragment {
  TileRange range;
  uint32_t tiles_bytes = 0;
  uint32_t bytes = 0;
  uint32_t logical_tile_bytes = 0;
  Below below = Below::kAbsent;
  // True if a writer was promised that the fragment would be durable, and it has not been since.
  bool owed = false;
  // True if the fragment is queued and a writer was promised this after it had been queued.
  bool owed_again = false;
  Slot slot;

  uint64_t logical_bytes() const {
    return static_cast<uint64_t>(range.tiles()) * logical_tile_bytes;
  }
};

// The state of one keyspace in a tier's index.
struct PageSpace {
  uint32_t partition = 0;
  uint64_t generation = 0;
  uint64_t bytes = 0;  // sum over fragments whose slots are not free yet
  HeldBytes::Account held;
  KeyIndex pages;
  KeyIndex vacant;  // places of absent pages that have children
};

// A page of a tier's index. Tiers read all fields. They write `below`, `owed` and `owed_again` of
// its fragments, `access`, `recency_dirty` and `pinned_until`; the classes of the index write the
// others.
struct Page {
  KeyspaceId keyspace;
  PageKey key;
  PageKey parent;
  uint64_t generation = 0;
  absl::InlinedVector<Fragment, 1> fragments;
  uint32_t references = 0;
  uint32_t holds = 0;          // references of leases and reads
  PageSpace* space = nullptr;  // the state of the page's keyspace
  uint64_t slots_bytes = 0;    // sum over the slots of its fragments
  uint32_t partition = 0;      // index of the partition whose policy orders it
  bool resident = false;       // false: removed, kept while it is referenced
  bool was_hit = false;
  bool recency_dirty = false;
  bool pinned = false;  // its bytes are held by a pin, which may have expired
  ItemHandle item = kNoItem;
  ForestHandle place = kNoForestNode;  // valid only if `resident`
  uint64_t access = 0;                 // the tier's own count of accesses when it was last used
  TimePoint added;
  TimePoint used;
  TimePoint pinned_until;

  // Whether the page's fragments have all tiles of the range.
  bool Covers(const TileRange& range) const {
    if (fragments.size() == 1) return Contains(fragments[0].range, range);
    int tiles = 0;
    for (const Fragment& fragment : fragments) tiles += Intersect(fragment.range, range).tiles();
    return tiles == range.tiles();
  }
  FragmentMeta MetaOf(const Fragment& fragment) const {
    return {.keyspace = keyspace,
            .key = key,
            .parent = parent,
            .generation = generation,
            .range = fragment.range,
            .tiles_bytes = fragment.tiles_bytes,
            .bytes = fragment.bytes,
            .logical_tile_bytes = fragment.logical_tile_bytes};
  }
};

}  // namespace crumb::storage
