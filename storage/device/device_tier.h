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
#include "storage/device/device_pool_index.h"
#include "storage/host_image.h"
#include "storage/store_options.h"
#include "storage/tiered_store.h"

namespace crumb::storage {

// The tier of device pools: memory of GPUs that the workers of a tenant share. The tier records
// which fragments are in which slots of which pools and which processes hold the slots, and chooses
// the pages to evict (DevicePoolIndex). It neither reads nor copies their bytes; processes that map
// a pool do (Demoters). Thread-safe.
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
    size_t page_fragments_max = SIZE_MAX;  // fragments of one page in one pool
    // Whether a tier below has all of a fragment, so that its slot can be used again at once.
    // Called without the lock.
    std::function<bool(const FragmentMeta&)> is_below;
    DeletionEpochs epochs = {};
  };
  // Requests that copy pages from slots to the host tier. The functions are called without the lock
  // and must not block.
  struct Demoters {
    // A process that maps the pool; 0: there is none.
    std::function<HolderId(DevicePoolNumber)> choose;
    // Requests the copies from the process. Returns false if its session has ended.
    std::function<bool(DevicePoolNumber, HolderId, std::span<const DemotionWork>)> request;
  };

  // `events` are called without the lock.
  DeviceTier(Options options, const Clock& clock, FragmentTierEvents events);

  // REQUIRES: no pool was added yet. The functions must stay valid as long as calls are made.
  void SetDemoters(Demoters demoters) { demoters_ = std::move(demoters); }

  // Adds a pool and returns its number, which is never used again. kInvalidArgument: the sizes.
  // DevicePoolIndex explains `recovering` and `removed_marks`.
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

  // Takes up to `count` blank slots for the holder and evicts pages if too few slots are free. A
  // page that no tier below has is first copied by a process that maps the pool (Demoters); it is
  // lost, and counted, if there is no such process or too many copies are under way.
  std::vector<uint64_t> Reserve(DevicePoolNumber pool, HolderId holder, size_t count);
  // Calls DevicePoolIndex::Commit. kAlreadyExists: the pool has tiles of the page; kAborted: the
  // fragment is of a dropped generation.
  absl::Status Commit(DevicePoolNumber pool, HolderId holder, uint64_t slot,
                      const std::shared_ptr<const FragmentHeader>& header,
                      uint32_t logical_tile_bytes);
  // Calls DevicePoolIndex::Claim, without the header if the page was deleted or may have been
  // (DeletionEpochs); the pool's next index will not have such a page either.
  bool Claim(DevicePoolNumber pool, HolderId holder, uint64_t slot,
             std::shared_ptr<const FragmentHeader> header, uint32_t logical_tile_bytes);
  // Returns DevicePoolIndex::PageAt for each slot.
  std::vector<std::shared_ptr<const FragmentHeader>> HeadersAt(
      DevicePoolNumber pool, std::span<const uint64_t> slots) const;
  // Removes a damaged page from the pool, and counts it. Processes and leases that use it keep its
  // slots; later requests miss it. Returns false if the slot has no such page.
  bool Withdraw(DevicePoolNumber pool, uint64_t slot, const PageKey& key);
  // Ends the holder's holds of these slots. Returns how many of the slots it did not hold.
  size_t Release(DevicePoolNumber pool, HolderId holder, std::span<const uint64_t> slots);
  // Ends all holds of the holder except those of the slots in `kept`. Returns how many it ended.
  size_t ReleaseAllBut(DevicePoolNumber pool, HolderId holder, std::span<const uint64_t> kept);
  // Records that the holder has copied these slots to the host tier. Returns how many of them it
  // was not requested to copy.
  size_t Demoted(DevicePoolNumber pool, HolderId holder, std::span<const uint64_t> slots);
  // Ends all holds of a process that has exited. Pages that it was requested to copy are lost.
  void EndHolder(HolderId holder);
  // Ends the copies that a process was requested to make, because it can make no more. Their pages
  // are lost; its holds stay.
  void EndDemotions(HolderId holder);
  // Does the same in one pool.
  void EndDemotions(DevicePoolNumber pool, HolderId holder);
  size_t HeldBy(DevicePoolNumber pool, HolderId holder) const;

  // The pools that have fragments of one page, with a reference to it in each; empty if the page is
  // not covered.
  using PlacesOf = absl::InlinedVector<std::pair<DevicePoolNumber, PageHandle>, 1>;
  // Refers to the pages that the request's pools cover, in the order of the pools. The result has
  // one entry per key.
  std::vector<PlacesOf> Ref(const AcquireRequest& request);
  void Unref(std::span<const PlacesOf> pages);
  // Returns for each of the request's keys whether its pools cover it.
  std::vector<bool> Covered(const AcquireRequest& request) const;

  // Appends the fragments in request.range of the leading pages, at most `fragments_max` of them,
  // and records that they are read; fragment.page is the index in `pages`, which may have empty
  // entries. Ends the references to the remaining pages and removes those from `pages`.
  void NameFragments(const AcquireRequest& request, size_t fragments_max,
                     std::vector<PlacesOf>* pages, std::vector<DeviceFragmentRef>* fragments);
  // Returns the fragments in `range` of pages that the caller refers to.
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
  // Called for a pool that later deletions will not reach until its processes reconnect to this
  // tier or to a successor. The deletions are recorded (deleted_), and a crash loses the records,
  // so the epoch in the pool's roster is set to one that no later crumbd knows.
  void LeaveToNotes(DevicePoolIndex& index) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  // Limit of the keys in deleted_, some 4 MiB.
  static constexpr size_t kDeletedKeysMax = 65'536;
  struct DeletedPages {
    absl::flat_hash_set<PageKey> keys;
    bool forgotten = false;  // any page of the keyspace may have been deleted
  };

  // A page chosen to leave.
  struct Leaving {
    PoolDepartures::Departure departure;
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
    PageEntries::View pages;
  };
  std::vector<Source> SourcesOf(const AcquireRequest& request) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Returns the places of one page. `seen` has the request's range and is reused for all keys under
  // one lock; the cost is added to `steps`.
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
  // Requests processes to copy `leaving` to a lower tier. If no process can copy a page, it is
  // evicted as long as `needed` slots are not free.
  void Demote(DevicePoolNumber pool, const std::vector<Leaving>& leaving, size_t needed);
  std::vector<DemotionWork> BeginDemotions(DevicePoolNumber pool, HolderId holder,
                                           std::span<const Leaving> leaving, size_t* requested);
  // Calls the events for changes of pools. REQUIRES: the lock is not held.
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
  size_t deleted_keys_ ABSL_GUARDED_BY(mutex_) = 0;  // sum over deleted_
  TierStats removed_ ABSL_GUARDED_BY(mutex_);        // counters of pools that are gone
  // Counters of pools that were taken and are not freed yet.
  std::map<DevicePoolNumber, TierStats> ending_ ABSL_GUARDED_BY(mutex_);
  uint64_t demoted_ ABSL_GUARDED_BY(mutex_) = 0;
  uint64_t dropped_ ABSL_GUARDED_BY(mutex_) = 0;
  uint64_t withdrawn_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace crumb::storage
