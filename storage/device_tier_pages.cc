// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <utility>

#include "storage/coverage.h"
#include "storage/device_tier.h"

namespace crumb::storage {
namespace {

// Keys whose places in the index are brought to the cache before they are looked up.
constexpr size_t kPrefetchAhead = 8;
// Look-ups, of one key in one pool each, while the lock is held once: about a millisecond.
constexpr size_t kLookupsPerLock = 32'768;
// Pages that are removed while the lock is held once.
constexpr size_t kRemovalsPerLock = 1024;

// Keys that are looked up in each of so many pools while the lock is held once.
size_t KeysPerLock(size_t pools) {
  return std::max<size_t>(1, kLookupsPerLock / std::max<size_t>(1, pools));
}

bool Usable(const Page& page, const AcquireRequest& request) {
  return page.generation >= request.generation;
}

}  // namespace

std::vector<DeviceTier::Source> DeviceTier::SourcesOf(const AcquireRequest& request) const {
  std::vector<Source> sources;
  for (const DevicePoolNumber number : request.pools) {
    DevicePoolIndex* pool = Find(number);
    if (pool == nullptr) continue;
    PageTable& table = pool->table();
    const PageTable::View pages = table.ViewOf(request.keyspace);
    if (!pages.empty()) sources.push_back({number, &table, pages});
  }
  return sources;
}

DeviceTier::PlacesOf DeviceTier::Places(std::span<const Source> sources,
                                        const AcquireRequest& request, const PageKey& key) {
  PlacesOf places;
  std::vector<TileRange> covered;
  const KeyIndex::Hashed hashed = KeyIndex::Hash(key);
  for (const Source& source : sources) {
    const PageHandle handle = source.pages.Find(hashed);
    if (handle == kNoPage || !Usable((*source.table)[handle], request)) continue;
    const Page& page = (*source.table)[handle];
    if (places.empty() && page.Covers(request.range)) {
      places.push_back({source.number, handle});
      return places;
    }
    // Pieces of several pools: taken when they add tiles and overlap nothing.
    bool adds = false;
    bool overlaps = false;
    for (const Fragment& fragment : page.fragments) {
      if (!Overlaps(fragment.range, request.range)) continue;
      adds = true;
      overlaps |= std::any_of(covered.begin(), covered.end(), [&](const TileRange& there) {
        return Overlaps(there, fragment.range);
      });
    }
    if (!adds || overlaps) continue;
    for (const Fragment& fragment : page.fragments) covered.push_back(fragment.range);
    places.push_back({source.number, handle});
  }
  if (places.empty() || !Covers(covered, request.range)) places.clear();
  return places;
}

std::vector<DeviceTier::PlacesOf> DeviceTier::Ref(const AcquireRequest& request) {
  const std::span<const PageKey> keys = request.keys;
  std::vector<PlacesOf> pages(keys.size());
  const size_t step = KeysPerLock(request.pools.size());
  for (size_t first = 0; first < keys.size(); first += step) {
    const size_t end = std::min(keys.size(), first + step);
    MutexLock lock(&mutex_);
    const std::vector<Source> sources = SourcesOf(request);
    if (sources.empty()) break;
    for (size_t i = first; i < end; ++i) {
      if (i + kPrefetchAhead < end) {
        const KeyIndex::Hashed ahead = KeyIndex::Hash(keys[i + kPrefetchAhead]);
        for (const Source& source : sources) source.pages.Prefetch(ahead);
      }
      pages[i] = Places(sources, request, keys[i]);
      for (const auto& [pool, page] : pages[i]) TableOf(pool).Ref(page);
    }
  }
  return pages;
}

void DeviceTier::Unref(std::span<const PlacesOf> pages) {
  MutexLock lock(&mutex_);
  for (const PlacesOf& places : pages) {
    for (const auto& [pool, page] : places) TableOf(pool).Unref(page);
  }
}

std::vector<bool> DeviceTier::Covered(const AcquireRequest& request) const {
  std::vector<bool> covered(request.keys.size());
  if (request.pools.empty()) return covered;
  const size_t step = KeysPerLock(request.pools.size());
  for (size_t first = 0; first < covered.size(); first += step) {
    const size_t end = std::min(covered.size(), first + step);
    MutexLock lock(&mutex_);
    const std::vector<Source> sources = SourcesOf(request);
    if (sources.empty()) break;
    for (size_t i = first; i < end; ++i) {
      covered[i] = !Places(sources, request, request.keys[i]).empty();
    }
  }
  return covered;
}

void DeviceTier::AddRefs(const PlacesOf& places, uint32_t index, const TileRange& range,
                         std::vector<DeviceFragmentRef>* fragments) const {
  for (const auto& [number, handle] : places) {
    const DevicePoolIndex& pool = *Find(number);
    for (const Fragment& fragment : pool.table()[handle].fragments) {
      if (!Overlaps(fragment.range, range)) continue;
      fragments->push_back({.page = index,
                            .pool = number,
                            .slot = pool.slots().NumberOf(fragment.slot),
                            .header = pool.HeaderAt(fragment.slot)});
    }
  }
}

LeaseId DeviceTier::Lease(const AcquireRequest& request, std::vector<PlacesOf> pages, LeaseId below,
                          std::vector<uint32_t> below_pages,
                          std::vector<DeviceFragmentRef>* fragments) {
  const TimePoint now = clock_.Now();
  fragments->reserve(pages.size());
  MutexLock lock(&mutex_);
  std::map<DevicePoolNumber, std::vector<PageHandle>> read;
  for (size_t i = 0; i < pages.size(); ++i) {
    AddRefs(pages[i], static_cast<uint32_t>(i), request.range, fragments);
    for (const auto& [number, handle] : pages[i]) {
      read[number].push_back(handle);
      PageTable& table = TableOf(number);
      for (const Fragment& fragment : table[handle].fragments) {
        if (Overlaps(fragment.range, request.range)) table.CountGet(fragment);
      }
    }
  }
  for (const auto& [number, handles] : read) TableOf(number).NoteRead(handles, now);
  const LeaseId lease = ++last_lease_ | kOwnLease;
  if (below == 0) ++leases_alone_;
  leases_[lease] = {std::move(pages), below, std::move(below_pages), now};
  return lease;
}

std::optional<DeviceTier::LeaseView> DeviceTier::ReadLease(LeaseId lease,
                                                           const TileRange& range) const {
  MutexLock lock(&mutex_);
  const auto found = leases_.find(lease);
  if (found == leases_.end()) return std::nullopt;
  const LeaseRecord& record = found->second;
  LeaseView view;
  view.pages = static_cast<uint32_t>(record.pages.size());
  view.below = record.below;
  view.below_pages = record.below_pages;
  for (size_t i = 0; i < record.pages.size(); ++i) {
    AddRefs(record.pages[i], static_cast<uint32_t>(i), range, &view.fragments);
  }
  return view;
}

std::optional<LeaseId> DeviceTier::Release(LeaseId lease) {
  MutexLock lock(&mutex_);
  const auto found = leases_.find(lease);
  if (found == leases_.end()) return std::nullopt;
  for (const PlacesOf& places : found->second.pages) {
    for (const auto& [pool, page] : places) TableOf(pool).Unref(page);
  }
  const LeaseId below = found->second.below;
  if (below == 0) --leases_alone_;
  leases_.erase(found);
  return below;
}

void DeviceTier::Touch(const KeyspaceId& keyspace, std::span<const PageKey> keys) {
  for (const DevicePoolNumber number : Numbers()) {
    MutexLock lock(&mutex_);
    DevicePoolIndex* pool = Find(number);
    if (pool == nullptr) continue;
    PageTable& table = pool->table();
    table.BeginAccess();
    for (auto key = keys.rbegin(); key != keys.rend(); ++key) {
      const PageHandle page = table.Find(keyspace, *key);
      if (page != kNoPage) table.Hit(page);
    }
  }
}

std::vector<PageKey> DeviceTier::Remove(const KeyspaceId& keyspace, std::span<const PageKey> keys) {
  std::vector<bool> was_there(keys.size());
  for (const DevicePoolNumber number : Numbers()) {
    for (size_t first = 0; first < keys.size(); first += kRemovalsPerLock) {
      const size_t end = std::min(keys.size(), first + kRemovalsPerLock);
      std::vector<PageTable::Change> changes;
      {
        MutexLock lock(&mutex_);
        DevicePoolIndex* pool = Find(number);
        if (pool == nullptr) break;
        for (size_t i = first; i < end; ++i) {
          const PageHandle page = pool->table().Find(keyspace, keys[i]);
          if (page == kNoPage) continue;
          pool->table().Remove(page, RemovalReason::kDeleted, clock_.Now());
          was_there[i] = true;
        }
        changes = pool->table().TakeChanges();
      }
      Announce(changes);
    }
  }
  std::vector<PageKey> removed;
  for (size_t i = 0; i < keys.size(); ++i) {
    if (was_there[i]) removed.push_back(keys[i]);
  }
  return removed;
}

// The generation is raised in all pools first: from then on no page below it is inserted.
std::vector<PageKey> DeviceTier::Drop(const KeyspaceId& keyspace, uint64_t generation) {
  {
    MutexLock lock(&mutex_);
    uint64_t& raised = generations_[keyspace];
    raised = std::max(raised, generation);
    for (const auto& [number, pool] : pools_) pool->table().RaiseGeneration(keyspace, generation);
  }
  std::vector<PageKey> removed;
  for (const DevicePoolNumber pool : Numbers()) {
    const std::vector<PageKey> keys = RemoveBelow(pool, keyspace, generation);
    removed.insert(removed.end(), keys.begin(), keys.end());
  }
  std::sort(removed.begin(), removed.end());
  removed.erase(std::unique(removed.begin(), removed.end()), removed.end());
  return removed;
}

std::vector<PageKey> DeviceTier::RemoveBelow(DevicePoolNumber number, const KeyspaceId& keyspace,
                                             uint64_t generation) {
  std::vector<PageKey> removed;
  while (true) {
    std::vector<PageTable::Change> changes;
    {
      MutexLock lock(&mutex_);
      DevicePoolIndex* pool = Find(number);
      if (pool == nullptr) return removed;
      PageTable& table = pool->table();
      const auto pages = table.PagesBelow(keyspace, generation, kRemovalsPerLock);
      if (pages.empty()) return removed;
      for (const PageHandle page : pages) {
        removed.push_back(table[page].key);
        table.Remove(page, RemovalReason::kDeleted, clock_.Now());
      }
      changes = table.TakeChanges();
    }
    Announce(changes);
  }
}

uint32_t DeviceTier::Pin(const KeyspaceId& keyspace, std::span<const PageKey> keys,
                         TimePoint until) {
  uint32_t pinned = 0;
  MutexLock lock(&mutex_);
  for (const PageKey& key : keys) {
    bool found = false;
    for (const auto& [number, pool] : pools_) {
      const PageHandle page = pool->table().Find(keyspace, key);
      if (page == kNoPage) continue;
      pool->table()[page].pinned_until = until;
      found = true;
    }
    if (found) ++pinned;
  }
  return pinned;
}

std::optional<PageKey> DeviceTier::ParentOf(const KeyspaceId& keyspace, const PageKey& key) const {
  MutexLock lock(&mutex_);
  for (const auto& [number, pool] : pools_) {
    const PageHandle page = pool->table().Find(keyspace, key);
    if (page != kNoPage) return pool->table()[page].parent;
  }
  return std::nullopt;
}

void DeviceTier::ForEachPage(const KeyspaceId& keyspace,
                             const std::function<void(const PageKey&)>& visit) const {
  std::vector<PageKey> keys;
  for (const DevicePoolNumber number : Numbers()) {
    MutexLock lock(&mutex_);
    const DevicePoolIndex* pool = Find(number);
    if (pool == nullptr) continue;
    pool->table().ForEachPage(keyspace, [&](const Page& page) { keys.push_back(page.key); });
  }
  std::sort(keys.begin(), keys.end());
  keys.erase(std::unique(keys.begin(), keys.end()), keys.end());
  for (const PageKey& key : keys) visit(key);
}

}  // namespace crumb::storage
