// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "absl/container/inlined_vector.h"
#include "common/clock.h"
#include "storage/coverage.h"
#include "storage/device/device_slots.h"
#include "storage/device/device_state.h"
#include "storage/host_image.h"
#include "storage/store_options.h"
#include "storage/tiered_store.h"

namespace crumb::storage {

// The tier of device pools: memory of GPUs that the workers of a tenant share. Serves readers:
// finds and refers to pages in the pools that a request names, names their fragments, and removes
// and pins pages in all pools. slots() serves the processes that map the pools. DeviceState has the
// pools and the lock. Thread-safe.
class DeviceTier {
 public:
  using Options = DeviceState::Options;

  // `events` are called without the lock.
  DeviceTier(Options options, const Clock& clock, FragmentTierEvents events)
      : state_(std::move(options), clock, std::move(events)), slots_(state_) {}

  DeviceSlots& slots() { return slots_; }

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
  std::vector<HostImage::Deleted> HandOverDeleted() { return state_.HandOverDeleted(); }
  void AddDeleted(std::span<const HostImage::Deleted> deleted);

  // Fills stats.device and stats.pools.
  void AddStats(StoreStats& stats) const { state_.AddStats(stats); }

 private:
  // A pool that a request names, and the pages that it has of the request's keyspace. Pools without
  // any are left out, so that a look-up costs nothing for the pools of a tenant's other models.
  struct Source {
    DevicePoolNumber number = 0;
    PageTable* table = nullptr;
    PageEntries::View pages;
  };
  std::vector<Source> SourcesOf(const AcquireRequest& request) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(state_.mutex);
  // Returns the places of one page. `seen` has the request's range and is reused for all keys under
  // one lock; the cost is added to `steps`.
  static PlacesOf Places(std::span<const Source> sources, const AcquireRequest& request,
                         const PageKey& key, TileSet& seen, size_t* steps);
  // Adds a page's fragments and counts that they are read. Returns false, and does nothing, if
  // there would be more than `fragments_max`.
  bool AddRead(const PlacesOf& places, uint32_t index, const TileRange& range, size_t fragments_max,
               std::vector<DeviceFragmentRef>* fragments)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(state_.mutex);
  void AddRefs(const PlacesOf& places, uint32_t index, const TileRange& range,
               std::vector<DeviceFragmentRef>* fragments) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(state_.mutex);
  // Removes those pages of a keyspace that are below `generation`; returns the keys of the removed.
  std::vector<PageKey> RemoveOlderThan(DevicePoolNumber pool, const KeyspaceId& keyspace,
                                       uint64_t generation);

  DeviceState state_;
  DeviceSlots slots_;
};

}  // namespace crumb::storage
