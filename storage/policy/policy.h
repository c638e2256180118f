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

// Which item of a tier leaves next. A policy knows items, their chains and what happened to them;
// it holds no pages, takes no locks and reads no clock, so that a tier and a trace replay run the
// very same code.
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
  // or the parent is not resident.
  ItemHandle parent = kNoItem;
};

enum class Removal {
  kEvicted,  // for want of room: the item's history is remembered for a while
  kDeleted,  // for any other reason: forgotten
};

// What a policy holds besides what it decides.
struct PolicyUsage {
  size_t items = 0;         // resident
  size_t ghosts = 0;        // remembered after eviction
  size_t memory_bytes = 0;  // of the policy's own structures
};

// Orders the items of one tier for eviction.
//
// Time is counted in accesses: BeginAccess() opens one (a lookup, a commit, one replayed request)
// and whatever follows belongs to it. Within an access, Hit() the items that were served deepest
// first, so that the beginning of a chain ends as its most recent item, and Insert() new ones
// parents first; an item inserted below a parent of the same access ranks right behind it.
//
// Every policy but `fifo` evicts leaves first: an item with a resident child is never a victim.
// Deterministic: the same calls give the same victims. Calls cost O(1) or O(log items), amortised.
// Not thread-safe: the caller's lock covers it. Handles passed in must be resident.
class EvictionPolicy {
 public:
  virtual ~EvictionPolicy() = default;

  virtual std::string_view name() const = 0;

  // Opens the next access.
  virtual void BeginAccess() = 0;

  // Adds an item; it counts as used by the current access.
  virtual ItemHandle Insert(const ItemInfo& info) = 0;

  // Makes `parent` the parent of `child`, which had none resident: after a restart, or when a
  // parent arrives late. Changes no recency. No cycles.
  virtual void Link(ItemHandle child, ItemHandle parent) = 0;

  // The current access read `item`.
  virtual void Hit(ItemHandle item) = 0;

  // Forgets a resident item; its children stay, without a parent. The handle is free afterwards.
  virtual void Remove(ItemHandle item, Removal reason) = 0;

  // The item to evict next, or nullopt when there is none that is not pinned. The item stays
  // resident until Remove(). A pinned item that stands in the way counts as recently used.
  virtual std::optional<ItemHandle> Victim(absl::FunctionRef<bool(ItemHandle)> is_pinned) = 0;

  virtual PolicyUsage Usage() const = 0;
};

// Makes the policy called `name` for a tier of about `capacity_items` items, which bounds what it
// remembers of evicted ones. kInvalidArgument for an unknown name, listing the known ones.
//
// After a restart a tier re-creates recency by inserting its items least recent first, one access
// per persisted access, and linking them afterwards.
absl::StatusOr<std::unique_ptr<EvictionPolicy>> MakePolicy(std::string_view name,
                                                           size_t capacity_items);

// The names MakePolicy() knows.
std::vector<std::string> PolicyNames();

}  // namespace crumb::storage
