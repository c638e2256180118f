// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "common/clock.h"
#include "common/mutex.h"
#include "storage/device/device_pool_index.h"
#include "storage/host_image.h"
#include "storage/store_options.h"
#include "storage/tiered_store.h"

namespace crumb::storage {

// The indexes of all device pools, with the lock that covers them. DeviceSlots serves the processes
// that map the pools and write to their slots, DeviceTier serves readers of the pages.
//
// Requests of all tenants wait for the one lock, so no call holds it for more work than its request
// names: calls that concern a whole pool or all slots of a process take it piece by piece, and
// memory of the size of a handle is allocated before it is taken. Other callers may see a part of
// such a call.
//
// A PageHandle of a pool is valid while its page is resident or referred to. A pool can be removed
// only if nothing in it is held or referred to (DevicePoolIndex::InUse), so no reference outlives
// its pool.
//
// Deleted pages are noted, because a process that comes back later may hold such a page in a slot
// that this process does not know yet: it claims the slot without the page.
struct DeviceState {
  struct Options {
    DeviceOptions device;
    size_t page_fragments_max = SIZE_MAX;  // fragments of one page in one pool
    // Whether a tier below has all of a fragment, so that its slot can be used again at once.
    // Called without the lock.
    std::function<bool(const FragmentMeta&)> is_below;
    DeletionEpochs epochs = {};
  };

  // `tier_events` are called without the lock.
  DeviceState(Options device_options, const Clock& device_clock, FragmentTierEvents tier_events);

  // Returns null if there is no such pool.
  DevicePoolIndex* Find(DevicePoolNumber pool) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex);
  // REQUIRES: the pool is there, for example because the caller refers to a page of it.
  PageTable& TableOf(DevicePoolNumber pool) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex) {
    return pools.find(pool)->second->table();
  }
  std::vector<DevicePoolNumber> Numbers() const;

  // Called for a pool that later deletions will not reach until its processes reconnect to this
  // tier or to a successor. The deletions are recorded (deleted_), and a crash loses the records,
  // so the epoch in the pool's roster is set to one that no later crumbd knows.
  void LeaveToNotes(DevicePoolIndex& index) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex);
  void NoteDeleted(const KeyspaceId& keyspace, std::span<const PageKey> keys);
  // Any page of the keyspace may have been deleted from now on.
  void NoteAllDeleted(const KeyspaceId& keyspace);
  bool MayBeDeleted(const FragmentHeader& header) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex);
  // Returns the notes for a successor process, and leaves all pools to them.
  std::vector<HostImage::Deleted> HandOverDeleted();

  // Calls the events for changes of pools. REQUIRES: the lock is not held.
  void Announce(const std::vector<PageTable::Change>& changes) const;
  // Fills stats.device and stats.pools.
  void AddStats(StoreStats& stats) const;

  const Options options;
  const Clock& clock;
  const FragmentTierEvents events;

  mutable Mutex mutex;
  std::map<DevicePoolNumber, std::unique_ptr<DevicePoolIndex>> pools ABSL_GUARDED_BY(mutex);
  DevicePoolNumber last_pool ABSL_GUARDED_BY(mutex) = 0;
  // Generations that pools which are added later must raise their keyspaces to.
  absl::flat_hash_map<KeyspaceId, uint64_t> generations ABSL_GUARDED_BY(mutex);
  TierStats removed ABSL_GUARDED_BY(mutex);  // counters of pools that are gone
  // Counters of pools that were taken and are not freed yet.
  std::map<DevicePoolNumber, TierStats> ending ABSL_GUARDED_BY(mutex);
  uint64_t demoted ABSL_GUARDED_BY(mutex) = 0;
  uint64_t dropped ABSL_GUARDED_BY(mutex) = 0;
  uint64_t withdrawn ABSL_GUARDED_BY(mutex) = 0;

 private:
  // Limit of the keys in deleted_, some 4 MiB.
  static constexpr size_t kDeletedKeysMax = 65'536;
  struct DeletedPages {
    absl::flat_hash_set<PageKey> keys;
    bool forgotten = false;  // any page of the keyspace may have been deleted
  };
  void Forget(DeletedPages& deleted) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex);

  // Pages that were deleted since this process began, or that a predecessor noted. When there are
  // more than kDeletedKeysMax, those of the keyspace that has the most are forgotten: no claim
  // brings a page of it from then on, and its deletions are noted no more.
  absl::flat_hash_map<KeyspaceId, DeletedPages> deleted_ ABSL_GUARDED_BY(mutex);
  size_t deleted_keys_ ABSL_GUARDED_BY(mutex) = 0;  // sum over deleted_
};

// Adds counters, which only grow, and leaves gauges out.
void AddCounters(TierStats& to, const TierStats& of);

}  // namespace crumb::storage
