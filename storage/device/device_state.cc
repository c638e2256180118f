// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "storage/device/device_state.h"

#include <algorithm>
#include <utility>

namespace crumb::storage {
namespace {

// Deleted pages that are noted while the lock is held once.
constexpr size_t kNotesPerHold = 1024;

void Add(HistogramSnapshot& to, const HistogramSnapshot& of) {
  if (to.bounds.empty()) {
    to = of;
    return;
  }
  for (size_t i = 0; i < of.counts.size(); ++i) to.counts[i] += of.counts[i];
  to.sum += of.sum;
}

void AddAll(TierStats& to, const TierStats& of) {
  AddCounters(to, of);
  to.capacity_bytes += of.capacity_bytes;
  to.resident_bytes += of.resident_bytes;
  to.resident_logical_bytes += of.resident_logical_bytes;
  to.pages += of.pages;
  to.waste_bytes += of.waste_bytes;
}

}  // namespace

void AddCounters(TierStats& to, const TierStats& of) {
  to.logical_put_bytes += of.logical_put_bytes;
  to.stored_put_bytes += of.stored_put_bytes;
  to.logical_get_bytes += of.logical_get_bytes;
  to.stored_get_bytes += of.stored_get_bytes;
  to.evicted.capacity += of.evicted.capacity;
  to.evicted.ancestor += of.evicted.ancestor;
  to.evicted.deleted += of.evicted.deleted;
  to.evicted.corrupt += of.evicted.corrupt;
  Add(to.page_lifetime_seconds, of.page_lifetime_seconds);
  Add(to.reuse_gap_seconds, of.reuse_gap_seconds);
}

DeviceState::DeviceState(Options device_options, const Clock& device_clock,
                         FragmentTierEvents tier_events)
    : options(std::move(device_options)), clock(device_clock), events(std::move(tier_events)) {
  MutexLock lock(&mutex);
  const Histogram none(LifetimeBounds());
  removed.page_lifetime_seconds = removed.reuse_gap_seconds = SnapshotOf(none);
}

DevicePoolIndex* DeviceState::Find(DevicePoolNumber pool) const {
  const auto found = pools.find(pool);
  return found == pools.end() ? nullptr : found->second.get();
}

std::vector<DevicePoolNumber> DeviceState::Numbers() const {
  std::vector<DevicePoolNumber> numbers;
  MutexLock lock(&mutex);
  for (const auto& [number, pool] : pools) numbers.push_back(number);
  return numbers;
}

void DeviceState::LeaveToNotes(DevicePoolIndex& index) const {
  if (index.epoch() == options.epochs.current) index.SetEpoch(options.epochs.previous);
}

void DeviceState::NoteDeleted(const KeyspaceId& keyspace, std::span<const PageKey> keys) {
  for (size_t first = 0; first < keys.size(); first += kNotesPerHold) {
    MutexLock lock(&mutex);
    DeletedPages& deleted = deleted_[keyspace];
    if (deleted.forgotten) return;
    for (const PageKey& key : keys.subspan(first, std::min(kNotesPerHold, keys.size() - first))) {
      deleted_keys_ += deleted.keys.insert(key).second ? 1 : 0;
    }
    if (deleted_keys_ <= kDeletedKeysMax) continue;
    const auto most = std::max_element(
        deleted_.begin(), deleted_.end(),
        [](const auto& a, const auto& b) { return a.second.keys.size() < b.second.keys.size(); });
    Forget(most->second);
  }
}

void DeviceState::NoteAllDeleted(const KeyspaceId& keyspace) {
  MutexLock lock(&mutex);
  Forget(deleted_[keyspace]);
}

void DeviceState::Forget(DeletedPages& deleted) {
  deleted_keys_ -= deleted.keys.size();
  deleted = {.keys = {}, .forgotten = true};
}

bool DeviceState::MayBeDeleted(const FragmentHeader& header) const {
  const auto found = deleted_.find(header.keyspace);
  if (found == deleted_.end()) return false;
  return found->second.forgotten || found->second.keys.contains(header.key);
}

std::vector<HostImage::Deleted> DeviceState::HandOverDeleted() {
  MutexLock lock(&mutex);
  for (const auto& [number, index] : pools) LeaveToNotes(*index);
  std::vector<HostImage::Deleted> all;
  for (const auto& [keyspace, deleted] : deleted_) {
    all.push_back({keyspace, deleted.forgotten, {deleted.keys.begin(), deleted.keys.end()}});
  }
  return all;
}

void DeviceState::Announce(const std::vector<PageTable::Change>& changes) const {
  for (const PageTable::Change& change : changes) {
    const auto& event = change.added ? events.added : events.removed;
    if (event) event(change.keyspace, change.key);
  }
}

void DeviceState::AddStats(StoreStats& stats) const {
  MutexLock lock(&mutex);
  stats.device = removed;
  for (const auto& [number, ended] : ending) AddCounters(stats.device, ended);
  stats.pools = {};
  stats.pools.pools = pools.size();
  stats.pools.demoted_slots = demoted;
  stats.pools.dropped_slots = dropped;
  stats.verify_failures_device = withdrawn;
  for (const auto& [number, pool] : pools) {
    AddAll(stats.device, pool->table().Stats());
    stats.pools.handles += pool->slots().handles();
    stats.pools.free_slots += pool->slots().free();
    stats.pools.unknown_slots += pool->slots().unknown();
    stats.pools.blank_slots += pool->blank();
    stats.pools.held_slots += pool->held();
    stats.pools.demoting_slots += pool->departures().demoting();
  }
}

}  // namespace crumb::storage
