// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"

// Eviction policies choose the item of a tier that leaves next. A policy has a record of each item,
// its chain and its uses; it holds no pages, takes no locks and reads no clock, so that a tier and
// a trace replay run the same code.
namespace crumb::storage {

// Names a resident item. Dense: handles of removed items are used again, so a caller can keep its
// own data in a vector indexed by handle.
using ItemHandle = uint32_t;
inline constexpr ItemHandle kNoItem = UINT32_MAX;

struct ItemInfo {
  // Identifies the item before, during and after residence, e.g. eight bytes of its page key. Used
  // to recognise items that were evicted and came back; a collision costs hits, never correctness.
  uint64_t fingerprint = 0;
  // The resident item whose absence makes this one unreachable; kNoItem when it begins a sequence
  // or the parent is not resident. Used to rank the item beside its parent.
  ItemHandle parent = kNoItem;
  // Whether resident items hang below this one already: it arrived after its children.
  bool has_children = false;
};

enum class Removal {
  kEvicted,  // its room was needed; the policy remembers the item's history for a while
  kDeleted,  // it left for any other reason; the policy forgets it
};

// Memory that a policy takes.
struct PolicyUsage {
  size_t items = 0;         // resident
  size_t ghosts = 0;        // remembered after eviction
  size_t memory_bytes = 0;  // memory of the policy's own structures
};

// Orders the items of one tier for eviction.
//
// A policy keeps no chains. The caller counts the resident children of each item and reports, by
// SetHasChildren, when an item gets its first child or loses its last one; so every call costs the
// same however long the chains are. ChainCounts does this for callers whose parents never arrive
// late.
//
// Time is counted in accesses: BeginAccess() opens one (a lookup, a commit, one replayed request)
// and whatever follows belongs to it. Within an access, Hit() the items that were served deepest
// first, so that the beginning of a chain ends as its most recent item, and Insert() new ones
// parents first; an item inserted below a parent of the same access ranks right behind it.
//
// Every policy but `fifo` evicts leaves first: an item that has children is never a victim.
// Policies are deterministic: the same calls give the same victims. Calls cost O(1) or O(log
// items), except for the search for a victim, whose cost its caller bounds. Not thread-safe: the
// caller's lock covers it. REQUIRES: handles that are passed in are resident.
class EvictionPolicy {
 public:
  virtual ~EvictionPolicy() = default;

  virtual std::string_view name() const = 0;

  // Opens the next access.
  virtual void BeginAccess() = 0;

  // Adds an item; it counts as used by the current access.
  virtual ItemHandle Insert(const ItemInfo& info) = 0;

  // The item got its first resident child, or lost its last one: call this after the child was
  // inserted or removed. Changes no recency; an item that lost its last child ranks as one that is
  // at least as old as that child was. REQUIRES: the value changes.
  virtual void SetHasChildren(ItemHandle item, bool has_children) = 0;

  // The current access read `item`.
  virtual void Hit(ItemHandle item) = 0;

  // Forgets a resident item, whether it has children or not. The handle is free afterwards.
  virtual void Remove(ItemHandle item, Removal reason) = 0;

  // The item to evict next. It stays resident until Remove(). A pinned item that stands in the way
  // counts as recently used. The search looks at no more than `steps` items and takes them off
  // `steps`. Returns nullopt when no item is free to go or, with `steps` at 0, when the search has
  // not seen all of them: the next call goes on from there.
  virtual std::optional<ItemHandle> FindVictim(absl::FunctionRef<bool(ItemHandle)> is_pinned,
                                               size_t& steps) = 0;

  // FindVictim without a bound.
  std::optional<ItemHandle> Victim(absl::FunctionRef<bool(ItemHandle)> is_pinned) {
    size_t steps = SIZE_MAX;
    return FindVictim(is_pinned, steps);
  }

  virtual PolicyUsage Usage() const = 0;
};

// Makes the policy called `name` for a tier of about `capacity_items` items, which also bounds the
// number of evicted items that it remembers. kInvalidArgument: the name is unknown; the message
// lists the known ones.
//
// After a restart a tier re-creates recency by inserting its items least recent first, one access
// per persisted access, parents before or after their children.
absl::StatusOr<std::unique_ptr<EvictionPolicy>> MakePolicy(std::string_view name,
                                                           size_t capacity_items);

// `default`: orders leaves by learned worth (ReusePolicy) while that serves a sample of the
// accesses better than the age of their last use, which it begins with. Two shadow caches of 4,000
// to 8,000 items, one per order, run on items picked by fingerprint.
// docs/adr/0003-eviction-policy.md.
std::unique_ptr<EvictionPolicy> MakeDefaultPolicy(size_t capacity_items);

// `fifo`: the item inserted first goes first, be it a leaf or not. A yardstick for replay.
std::unique_ptr<EvictionPolicy> MakeFifoPolicy();

// `lru`: the leaf whose last use is longest ago goes first.
std::unique_ptr<EvictionPolicy> MakeLruPolicy();

// `s3fifo`: S3-FIFO (Yang et al., SOSP 2023) over leaves. New items pass a small queue, a tenth of
// the residents; those used twice or more meanwhile, and those that come back after an eviction, go
// to the main queue, which gives an item one more round per use, up to three. Remembers four
// times `capacity_items` evicted items.
std::unique_ptr<EvictionPolicy> MakeS3FifoPolicy(size_t capacity_items);

// The names MakePolicy() knows.
std::vector<std::string> PolicyNames();

}  // namespace crumb::storage
