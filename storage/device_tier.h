// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/container/inlined_vector.h"
#include "absl/status/statusor.h"
#include "common/clock.h"
#include "common/mutex.h"
#include "storage/coverage.h"
#include "storage/device_pool_index.h"
#include "storage/host_image.h"
#include "storage/store_options.h"
#include "storage/tiered_store.h"

namespace crumb::storage {

// Pages in memory of devices, which workers share among themselves: which fragments lie in which
// slots of which pools, which processes use them, and what has to leave. Reads and moves no byte.
// Thread-safe.
//
// One lock covers the indexes of all pools, and requests of all tenants wait for it. So no call
// holds it for more work than its request names: calls that concern a whole pool or all slots of a
// process (EndPool, EndHolder, Drop) take it piece by piece, and memory of the size of a handle is
// allocated before it is taken.
//
// A PageHandle of a pool is valid while its page is resident or referred to. A pool can be removed
// only if nothing in it is held or referred to (DevicePoolIndex::InUse), so no reference outlives
// its pool.
class DeviceTier {
 public:
  struct Options {
    DeviceOptions device;
    size_t page_fragments_max = SIZE_MAX;  // of one page in one pool
    // Whether a tier below has all of a fragment, so that its slot can be used again at once.
    // Called without the lock.
    std::function<bool(const FragmentMeta&)> is_below;
    DeletionEpochs epochs = {};
  };
  // Copies slots to the tier where their fragments stay. Called without the lock; must not block.
  struct Demoters {
    // A process that maps the pool; 0: there is none.
    std::function<HolderId(DevicePoolNumber)> choose;
    // Requests the copies from the process. Returns false if its session has ended.
    std::function<bool(DevicePoolNumber, HolderId, std::span<const DemotionWork>)> request;
  };

  // `events` are called without the lock.
  DeviceTier(Options options, const Clock& clock, FragmentTierEvents events);

  // Set before the first pool; the functions live as long as calls are made.
  void SetDemoters(Demoters demoters) { demoters_ = std::move(demoters); }

  // A new pool of slots of `slot_bytes`; its number is never used again. kInvalidArgument: sizes.
  // `recovering`, `removed_marks`: see DevicePoolIndex.
  absl::StatusOr<DevicePoolNumber> AddPool(uint64_t slot_bytes, uint64_t handle_bytes,
                                           bool recovering,
                                           std::optional<SlotMarks> removed_marks = std::nullopt);
  // A pool that has been taken out of the tier: no call finds it any more.
  struct TakenPool {
    DevicePoolNumber number = 0;
    std::unique_ptr<DevicePoolIndex> index;  // null: there was no such pool
  };
  // Takes a pool out, in constant time. Returns none if one of its slots is held or one of its
  // pages referred to. The caller must pass the result to EndPool.
  std::optional<TakenPool> TakePool(DevicePoolNumber pool);
  // Announces that the pages of a taken pool are gone, and frees its memory. Takes time in the
  // number of its pages, almost all of it without the lock.
  void EndPool(TakenPool pool);
  // Returns false if there is no such pool or the handle is there already.
  bool AddHandle(DevicePoolNumber pool, uint32_t number);
  void EndRecovery(DevicePoolNumber pool);
  bool recovering(DevicePoolNumber pool) const;

  // Up to `count` blank slots, evicting pages for them. Pages that no tier below has are given to
  // be copied first, up to a bound; beyond it, and without a copier, they are lost and counted.
  std::vector<uint64_t> Reserve(DevicePoolNumber pool, HolderId holder, size_t count);
  // See DevicePoolIndex. kAlreadyExists: tiles of it are there; kAborted: of a dropped generation.
  absl::Status Commit(DevicePoolNumber pool, HolderId holder, uint64_t slot,
                      const std::shared_ptr<const FragmentHeader>& header,
                      uint32_t logical_tile_bytes);
  // See DevicePoolIndex. A page that was deleted, or may have been (DeletionEpochs), counts as
  // null, and stays one for the pool's next index.
  bool Claim(DevicePoolNumber pool, HolderId holder, uint64_t slot,
             std::shared_ptr<const FragmentHeader> header, uint32_t logical_tile_bytes);
  // See DevicePoolIndex::PageAt: one a slot.
  std::vector<std::shared_ptr<const FragmentHeader>> HeadersAt(
      DevicePoolNumber pool, std::span<const uint64_t> slots) const;
  // Takes a damaged page out of the pool, and counts it. Holders and leases of it keep its slots;
  // no one else gets it. Returns false when the page is not there.
  bool Withdraw(DevicePoolNumber pool, uint64_t slot, const PageKey& key);
  // Lets slots go; answers how many of them the holder did not hold.
  size_t Release(DevicePoolNumber pool, HolderId holder, std::span<const uint64_t> slots);
  // Lets go of all that the holder holds but those slots; answers how many.
  size_t ReleaseAllBut(DevicePoolNumber pool, HolderId holder, std::span<const uint64_t> kept);
  // Returns how many of the slots were not the holder's to copy.
  size_t Demoted(DevicePoolNumber pool, HolderId holder, std::span<const uint64_t> slots);
  // The process is gone: what it held is free, what it was to copy is lost.
  void EndHolder(HolderId holder);
  // The process copies no more: what it was to copy is lost.
  void EndDemotions(HolderId holder);
  // In one pool only.
  void EndDemotions(DevicePoolNumber pool, HolderId holder);
  size_t HeldBy(DevicePoolNumber pool, HolderId holder) const;

  // The places of one page, each with a reference; empty: the page is not covered.
  using PlacesOf = absl::InlinedVector<std::pair<DevicePoolNumber, PageHandle>, 1>;
  // Refers to the pages that the request's pools cover, the first pools first. One entry a key.
  std::vector<PlacesOf> Ref(const AcquireRequest& request);
  void Unref(std::span<const PlacesOf> pages);
  // Returns for each of the request's keys whether its pools cover it.
  std::vector<bool> Covered(const AcquireRequest& request) const;

  // Appends the fragments in request.range of the pages from the first on, as long as they are no
  // more than `fragments_max`, and notes that they are read; fragment.page is the index in `pages`,
  // which may have empty entries. Gives the references to the pages behind back and takes those out
  // of `pages`.
  void NameFragments(const AcquireRequest& request, size_t fragments_max,
                     std::vector<PlacesOf>* pages, std::vector<DeviceFragmentRef>* fragments);
  // The fragments in `range` of pages that the caller refers to.
  std::vector<DeviceFragmentRef> FragmentsOf(std::span<const PlacesOf> pages,
                                             const TileRange& range) const;

  void Touch(const KeyspaceId& keyspace, std::span<const PageKey> keys);
  std::vector<PageKey> Remove(const KeyspaceId& keyspace, std::span<const PageKey> keys);
  std::vector<PageKey> Drop(const KeyspaceId& keyspace, uint64_t generation);
  uint32_t Pin(const KeyspaceId& keyspace, std::span<const PageKey> keys, TimePoint until);
  std::optional<PageKey> ParentOf(const KeyspaceId& keyspace, const PageKey& key) const;
  void ForEachPage(const KeyspaceId& keyspace,
                   const std::function<void(const PageKey&)>& visit) const;

  // Returns the pages that were deleted, for the tier of a successor process. Nothing may be
  // deleted here any more.
  std::vector<HostImage::Deleted> HandOverDeleted();
  void AddDeleted(std::span<const HostImage::Deleted> deleted);

  // Fills stats.device and stats.pools.
  void AddStats(StoreStats& stats) const;

 private:
  // Later deletions do not reach the pool, until its processes are back at this tier or at a
  // successor, which note them. A crash loses the notes: from then on no epoch that a crumbd knows
  // is in the pool's roster.
  void LeaveToNotes(DevicePoolIndex& index) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  // Keys in deleted_: 4 MiB at most.
  static constexpr size_t kDeletedKeysMax = 65'536;
  struct DeletedPages {
    absl::flat_hash_set<PageKey> keys;
    bool forgotten = false;  // any page of the keyspace may have been deleted
  };

  // A page chosen to leave.
  struct Leaving {
    DevicePoolIndex::Departure departure;
    std::vector<FragmentMeta> fragments;
  };
  using Pools = std::map<DevicePoolNumber, std::unique_ptr<DevicePoolIndex>>;

  DevicePoolIndex* Find(DevicePoolNumber pool) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // REQUIRES: the pool is there, for example because the caller refers to a page of it.
  PageTable& TableOf(DevicePoolNumber pool) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return pools_.find(pool)->second->table();
  }
  // A pool that a request names, and the pages that it has of the request's keyspace. Pools without
  // any are left out, so that a look-up costs nothing for the pools of a tenant's other models.
  struct Source {
    DevicePoolNumber number = 0;
    PageTable* table = nullptr;
    PageTable::View pages;
  };
  std::vector<Source> SourcesOf(const AcquireRequest& request) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // `seen` has the request's range and serves all keys of a hold; `steps` counts what this cost.
  static PlacesOf Places(std::span<const Source> sources, const AcquireRequest& request,
                         const PageKey& key, TileSet& seen, size_t* steps);
  // Adds a page's fragments and counts that they are read. Returns false, and does nothing, if
  // there would be more than `fragments_max`.
  bool AddRead(const PlacesOf& places, uint32_t index, const TileRange& range, size_t fragments_max,
               std::vector<DeviceFragmentRef>* fragments) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void AddRefs(const PlacesOf& places, uint32_t index, const TileRange& range,
               std::vector<DeviceFragmentRef>* fragments) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void TakeBlanks(DevicePoolIndex& pool, HolderId holder, size_t count,
                  std::vector<uint64_t>* slots) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  std::vector<Leaving> ChooseLeaving(DevicePoolIndex& pool, size_t missing)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void NoteDeleted(const KeyspaceId& keyspace, std::span<const PageKey> keys);
  // Any page of the keyspace may have been deleted from now on.
  void Forget(DeletedPages& deleted) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool MayBeDeleted(const FragmentHeader& header) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Asks processes to copy `leaving` to a lower tier. Of the pages that no process can copy, as
  // many are evicted as free `needed` slots.
  void Demote(DevicePoolNumber pool, const std::vector<Leaving>& leaving, size_t needed);
  std::vector<DemotionWork> BeginDemotions(DevicePoolNumber pool, HolderId holder,
                                           std::span<const Leaving> leaving, size_t* asked);
  // Calls the events for what changed in pools. Without the lock.
  void Announce(const std::vector<PageTable::Change>& changes) const;
  std::vector<DevicePoolNumber> Numbers() const;
  // Removes those pages of a keyspace that are below `generation`; returns the keys of the removed.
  std::vector<PageKey> RemoveOlderThan(DevicePoolNumber pool, const KeyspaceId& keyspace,
                                       uint64_t generation);

  const Options options_;
  const Clock& clock_;
  const FragmentTierEvents events_;
  Demoters demoters_;

  mutable Mutex mutex_;
  Pools pools_ ABSL_GUARDED_BY(mutex_);
  DevicePoolNumber last_pool_ ABSL_GUARDED_BY(mutex_) = 0;
  absl::flat_hash_map<KeyspaceId, uint64_t> generations_ ABSL_GUARDED_BY(mutex_);
  // Pages that were deleted since this tier began, or that AddDeleted brought. A process that comes
  // back later may hold such a page in a slot that this tier does not know yet: it claims the slot
  // without the page. When there are more than kDeletedKeysMax, those of the keyspace that has the
  // most are forgotten: no claim brings a page of it from then on, and its deletions are noted no
  // more.
  absl::flat_hash_map<KeyspaceId, DeletedPages> deleted_ ABSL_GUARDED_BY(mutex_);
  size_t deleted_keys_ ABSL_GUARDED_BY(mutex_) = 0;  // in all of deleted_
  TierStats removed_ ABSL_GUARDED_BY(mutex_);        // counters of pools that are gone
  std::map<DevicePoolNumber, TierStats> ending_ ABSL_GUARDED_BY(mutex_);  // of taken pools
  uint64_t demoted_ ABSL_GUARDED_BY(mutex_) = 0;
  uint64_t dropped_ ABSL_GUARDED_BY(mutex_) = 0;
  uint64_t withdrawn_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace crumb::storage
