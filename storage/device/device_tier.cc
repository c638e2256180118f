// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "storage/device/device_tier.h"

#include <algorithm>
#include <map>
#include <utility>

#include "storage/bounds.h"
#include "storage/coverage.h"

namespace crumb::storage {
namespace {

// Look-ups of one key in one pool, and rows of tiles that are compared, while the lock is held
// once: about a millisecond.
constexpr size_t kStepsPerHold = 32'768;
// Pages that are let go, touched or visited, and fragments that are named, while the lock is held
// once.
constexpr size_t kDevicePagesPerHold = 4096;
constexpr size_t kDeviceFragmentsPerHold = 4096;
// Pages that are removed while the lock is held once.
constexpr size_t kRemovalsPerHold = 1024;

bool Usable(const Page& page, const AcquireRequest& request) {
  return page.generation >= request.generation;
}

}  // namespace

std::vector<DeviceTier::Source> DeviceTier::SourcesOf(const AcquireRequest& request) const {
  std::vector<Source> sources;
  for (const DevicePoolNumber number : request.pools) {
    DevicePoolIndex* pool = state_.Find(number);
    if (pool == nullptr) continue;
    PageTable& table = pool->table();
    const PageEntries::View pages = table.pages().ViewOf(request.keyspace);
    if (!pages.empty()) sources.push_back({number, &table, pages});
  }
  return sources;
}

DeviceTier::PlacesOf DeviceTier::Places(std::span<const Source> sources,
                                        const AcquireRequest& request, const PageKey& key,
                                        TileSet& seen, size_t* steps) {
  PlacesOf places;
  *steps += sources.size();
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
      const size_t rows = seen.Rows(fragment.range);
      *steps += 1 + rows;
      adds |= rows > 0;
      overlaps |= rows > 0 && seen.Overlaps(fragment.range);
      if (overlaps) break;
    }
    if (!adds || overlaps) continue;
    for (const Fragment& fragment : page.fragments) seen.Add(fragment.range);
    places.push_back({source.number, handle});
  }
  if (places.empty()) return places;
  if (!seen.full()) places.clear();
  seen.Clear();
  *steps += seen.Rows(request.range);
  return places;
}

std::vector<DeviceTier::PlacesOf> DeviceTier::Ref(const AcquireRequest& request) {
  const std::span<const PageKey> keys = request.keys;
  std::vector<PlacesOf> pages(keys.size());
  TileSet seen(request.range);
  for (size_t next = 0; next < keys.size();) {
    MutexLock lock(&state_.mutex);
    const std::vector<Source> sources = SourcesOf(request);
    if (sources.empty()) break;
    for (size_t steps = 0; next < keys.size() && steps < kStepsPerHold; ++next) {
      if (next + kPrefetchAhead < keys.size()) {
        const KeyIndex::Hashed ahead = KeyIndex::Hash(keys[next + kPrefetchAhead]);
        for (const Source& source : sources) source.pages.Prefetch(ahead);
      }
      pages[next] = Places(sources, request, keys[next], seen, &steps);
      for (const auto& [pool, page] : pages[next]) state_.TableOf(pool).Ref(page);
    }
  }
  return pages;
}

void DeviceTier::Unref(std::span<const PlacesOf> pages) {
  for (size_t first = 0; first < pages.size(); first += kDevicePagesPerHold) {
    MutexLock lock(&state_.mutex);
    for (const PlacesOf& places :
         pages.subspan(first, std::min(kDevicePagesPerHold, pages.size() - first))) {
      for (const auto& [pool, page] : places) state_.TableOf(pool).Unref(page);
    }
  }
}

std::vector<bool> DeviceTier::Covered(const AcquireRequest& request) const {
  std::vector<bool> covered(request.keys.size());
  if (request.pools.empty()) return covered;
  TileSet seen(request.range);
  for (size_t next = 0; next < covered.size();) {
    MutexLock lock(&state_.mutex);
    const std::vector<Source> sources = SourcesOf(request);
    if (sources.empty()) break;
    for (size_t steps = 0; next < covered.size() && steps < kStepsPerHold; ++next) {
      covered[next] = !Places(sources, request, request.keys[next], seen, &steps).empty();
    }
  }
  return covered;
}

void DeviceTier::AddRefs(const PlacesOf& places, uint32_t index, const TileRange& range,
                         std::vector<DeviceFragmentRef>* fragments) const {
  for (const auto& [number, handle] : places) {
    const DevicePoolIndex& pool = *state_.Find(number);
    for (const Fragment& fragment : pool.table()[handle].fragments) {
      if (!Overlaps(fragment.range, range)) continue;
      fragments->push_back({.page = index,
                            .pool = number,
                            .slot = pool.slots().NumberOf(fragment.slot),
                            .header = pool.HeaderAt(fragment.slot)});
    }
  }
}

bool DeviceTier::AddRead(const PlacesOf& places, uint32_t index, const TileRange& range,
                         size_t fragments_max, std::vector<DeviceFragmentRef>* fragments) {
  const auto wanted = [&](const Fragment& fragment) { return Overlaps(fragment.range, range); };
  size_t count = 0;
  for (const auto& [number, handle] : places) {
    const Page& page = state_.TableOf(number)[handle];
    count +=
        static_cast<size_t>(std::count_if(page.fragments.begin(), page.fragments.end(), wanted));
  }
  if (count > fragments_max - std::min(fragments_max, fragments->size())) return false;
  AddRefs(places, index, range, fragments);
  for (const auto& [number, handle] : places) {
    PageTable& table = state_.TableOf(number);
    for (const Fragment& fragment : table[handle].fragments) {
      if (wanted(fragment)) table.CountGet(fragment.logical_bytes(), fragment.bytes);
    }
  }
  return true;
}

void DeviceTier::NameFragments(const AcquireRequest& request, size_t fragments_max,
                               std::vector<PlacesOf>* pages,
                               std::vector<DeviceFragmentRef>* fragments) {
  const TimePoint now = state_.clock.Now();
  fragments->reserve(std::min(pages->size(), fragments_max));
  size_t named = 0;
  bool full = false;
  while (named < pages->size() && !full) {
    const size_t end = std::min(pages->size(), named + kDevicePagesPerHold);
    const size_t fragments_end = fragments->size() + kDeviceFragmentsPerHold;
    std::map<DevicePoolNumber, std::vector<PageHandle>> read;
    MutexLock lock(&state_.mutex);
    for (; named < end && fragments->size() < fragments_end; ++named) {
      const PlacesOf& places = (*pages)[named];
      full =
          !AddRead(places, static_cast<uint32_t>(named), request.range, fragments_max, fragments);
      if (full) break;
      for (const auto& [number, handle] : places) read[number].push_back(handle);
    }
    for (const auto& [number, handles] : read) state_.TableOf(number).NoteRead(handles, now);
  }
  Unref(std::span(*pages).subspan(named));
  pages->resize(named);
}

std::vector<DeviceFragmentRef> DeviceTier::FragmentsOf(std::span<const PlacesOf> pages,
                                                       const TileRange& range) const {
  std::vector<DeviceFragmentRef> fragments;
  for (size_t next = 0; next < pages.size();) {
    const size_t end = std::min(pages.size(), next + kDevicePagesPerHold);
    const size_t fragments_end = fragments.size() + kDeviceFragmentsPerHold;
    MutexLock lock(&state_.mutex);
    for (; next < end && fragments.size() < fragments_end; ++next) {
      AddRefs(pages[next], static_cast<uint32_t>(next), range, &fragments);
    }
  }
  return fragments;
}

void DeviceTier::Touch(const KeyspaceId& keyspace, std::span<const PageKey> keys) {
  for (const DevicePoolNumber number : state_.Numbers()) {
    for (size_t end = keys.size(); end > 0;) {
      const size_t begin = end - std::min(end, kDevicePagesPerHold);
      MutexLock lock(&state_.mutex);
      DevicePoolIndex* pool = state_.Find(number);
      if (pool == nullptr) break;
      PageTable& table = pool->table();
      if (end == keys.size()) table.order().BeginAccess();
      for (; end > begin; --end) {
        const PageHandle page = table.pages().Find(keyspace, keys[end - 1]);
        if (page != kNoPage) table.order().Hit(page);
      }
    }
  }
}

void DeviceTier::AddDeleted(std::span<const HostImage::Deleted> all) {
  for (const HostImage::Deleted& deleted : all) {
    state_.NoteDeleted(deleted.keyspace, deleted.keys);
    if (deleted.all) state_.NoteAllDeleted(deleted.keyspace);
  }
}

// Noted before pages are looked for: a process that claims a slot meanwhile brings none back.
std::vector<PageKey> DeviceTier::Remove(const KeyspaceId& keyspace, std::span<const PageKey> keys) {
  state_.NoteDeleted(keyspace, keys);
  std::vector<bool> was_there(keys.size());
  for (const DevicePoolNumber number : state_.Numbers()) {
    for (size_t first = 0; first < keys.size(); first += kRemovalsPerHold) {
      const size_t end = std::min(keys.size(), first + kRemovalsPerHold);
      std::vector<PageTable::Change> changes;
      {
        MutexLock lock(&state_.mutex);
        DevicePoolIndex* pool = state_.Find(number);
        if (pool == nullptr) break;
        for (size_t i = first; i < end; ++i) {
          const PageHandle page = pool->table().pages().Find(keyspace, keys[i]);
          if (page == kNoPage) continue;
          pool->Remove(page, RemovalReason::kDeleted, state_.clock.Now());
          was_there[i] = true;
        }
        changes = pool->table().TakeChanges();
      }
      state_.Announce(changes);
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
    MutexLock lock(&state_.mutex);
    uint64_t& raised = state_.generations[keyspace];
    raised = std::max(raised, generation);
    for (const auto& [number, pool] : state_.pools)
      pool->table().RaiseGeneration(keyspace, generation);
  }
  std::vector<PageKey> removed;
  for (const DevicePoolNumber pool : state_.Numbers()) {
    const std::vector<PageKey> keys = RemoveOlderThan(pool, keyspace, generation);
    removed.insert(removed.end(), keys.begin(), keys.end());
  }
  std::sort(removed.begin(), removed.end());
  removed.erase(std::unique(removed.begin(), removed.end()), removed.end());
  return removed;
}

std::vector<PageKey> DeviceTier::RemoveOlderThan(DevicePoolNumber number,
                                                 const KeyspaceId& keyspace, uint64_t generation) {
  std::vector<PageKey> removed;
  while (true) {
    std::vector<PageTable::Change> changes;
    {
      MutexLock lock(&state_.mutex);
      DevicePoolIndex* pool = state_.Find(number);
      if (pool == nullptr) return removed;
      PageTable& table = pool->table();
      const auto pages = table.pages().PagesOlderThan(keyspace, generation, kRemovalsPerHold);
      if (pages.empty()) return removed;
      for (const PageHandle page : pages) {
        removed.push_back(table[page].key);
        pool->Remove(page, RemovalReason::kDeleted, state_.clock.Now());
      }
      changes = table.TakeChanges();
    }
    state_.Announce(changes);
  }
}

uint32_t DeviceTier::Pin(const KeyspaceId& keyspace, std::span<const PageKey> keys,
                         TimePoint until) {
  uint32_t pinned = 0;
  MutexLock lock(&state_.mutex);
  for (const PageKey& key : keys) {
    bool found = false;
    for (const auto& [number, pool] : state_.pools) {
      const PageHandle page = pool->table().pages().Find(keyspace, key);
      if (page == kNoPage) continue;
      pool->table()[page].pinned_until = until;
      found = true;
    }
    if (found) ++pinned;
  }
  return pinned;
}

std::optional<PageKey> DeviceTier::ParentOf(const KeyspaceId& keyspace, const PageKey& key) const {
  MutexLock lock(&state_.mutex);
  for (const auto& [number, pool] : state_.pools) {
    const PageHandle page = pool->table().pages().Find(keyspace, key);
    if (page != kNoPage) return pool->table()[page].parent;
  }
  return std::nullopt;
}

void DeviceTier::ForEachPage(const KeyspaceId& keyspace,
                             const std::function<void(const PageKey&)>& visit) const {
  std::vector<PageKey> keys;
  for (const DevicePoolNumber number : state_.Numbers()) {
    for (PageHandle from = 0; from != kNoPage;) {
      MutexLock lock(&state_.mutex);
      const DevicePoolIndex* pool = state_.Find(number);
      if (pool == nullptr) break;
      from = pool->table().pages().Scan(
          keyspace, from, kDevicePagesPerHold,
          [&](PageHandle, const Page& page) { keys.push_back(page.key); });
    }
  }
  std::sort(keys.begin(), keys.end());
  keys.erase(std::unique(keys.begin(), keys.end()), keys.end());
  for (const PageKey& key : keys) visit(key);
}

}  // namespace crumb::storage
