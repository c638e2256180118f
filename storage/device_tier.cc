// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "storage/device_tier.h"

#include <algorithm>
#include <string>

#include "common/status_macros.h"

namespace crumb::storage {
namespace {

// Kernels and copies want tiles at this boundary.
constexpr uint64_t kTileAlignment = 128;
// Sizes what a policy remembers of evicted pages.
constexpr uint64_t kPolicyPages = 1 << 16;

void Add(HistogramSnapshot& to, const HistogramSnapshot& of) {
  if (to.bounds.empty()) {
    to = of;
    return;
  }
  for (size_t i = 0; i < of.counts.size(); ++i) to.counts[i] += of.counts[i];
  to.sum += of.sum;
}

// What is counted, without what there is.
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

void AddAll(TierStats& to, const TierStats& of) {
  AddCounters(to, of);
  to.capacity_bytes += of.capacity_bytes;
  to.resident_bytes += of.resident_bytes;
  to.resident_logical_bytes += of.resident_logical_bytes;
  to.pages += of.pages;
  to.waste_bytes += of.waste_bytes;
}

}  // namespace

DeviceTier::DeviceTier(Options options, const Clock& clock, FragmentTierEvents events)
    : options_(std::move(options)), clock_(clock), events_(std::move(events)) {
  MutexLock lock(&mutex_);
  const Histogram none(LifetimeBounds());
  removed_.page_lifetime_seconds = removed_.reuse_gap_seconds = SnapshotOf(none);
}

DevicePoolIndex* DeviceTier::Find(DevicePoolNumber pool) const {
  const auto found = pools_.find(pool);
  return found == pools_.end() ? nullptr : found->second.get();
}

absl::StatusOr<DevicePoolNumber> DeviceTier::AddPool(uint64_t slot_bytes, uint64_t handle_bytes,
                                                     bool recovering) {
  if (slot_bytes == 0 || slot_bytes % kTileAlignment != 0 || slot_bytes > UINT32_MAX ||
      handle_bytes < slot_bytes || handle_bytes / slot_bytes > UINT32_MAX) {
    return absl::InvalidArgumentError(
        "slot_bytes must be a multiple of 128 below 4 GiB and fit into handle_bytes, 2^32 times at "
        "most");
  }
  CRUMB_ASSIGN_OR_RETURN(auto policy, MakePolicy(options_.device.policy, kPolicyPages));
  MutexLock lock(&mutex_);
  auto index = std::make_unique<DevicePoolIndex>(
      std::move(policy), static_cast<uint32_t>(slot_bytes), handle_bytes, recovering);
  for (const auto& [keyspace, generation] : generations_) {
    index->table().RaiseGeneration(keyspace, generation);
  }
  pools_.emplace(++last_pool_, std::move(index));
  return last_pool_;
}

bool DeviceTier::RemovePool(DevicePoolNumber pool) {
  std::vector<PageTable::Change> changes;
  {
    MutexLock lock(&mutex_);
    DevicePoolIndex* index = Find(pool);
    if (index == nullptr) return true;
    std::vector<PageHandle> pages;
    bool used = index->held() > 0;
    index->table().ForEachPage([&](PageHandle handle, const Page& page) {
      pages.push_back(handle);
      used |= page.references > 0;
    });
    // Pages that were deleted while leased have their slots still.
    for (const auto& [id, lease] : leases_) {
      for (const PlacesOf& places : lease.pages) {
        for (const auto& [number, page] : places) used |= number == pool;
      }
    }
    if (used) return false;
    for (const PageHandle page : pages) {
      index->table().Remove(page, RemovalReason::kCapacity, clock_.Now());
    }
    changes = index->table().TakeChanges();
    AddCounters(removed_, index->table().Stats());
    pools_.erase(pool);
  }
  Announce(changes);
  return true;
}

bool DeviceTier::AddHandle(DevicePoolNumber pool, uint32_t number) {
  MutexLock lock(&mutex_);
  DevicePoolIndex* index = Find(pool);
  return index != nullptr && index->AddHandle(number);
}

void DeviceTier::EndRecovery(DevicePoolNumber pool) {
  MutexLock lock(&mutex_);
  if (DevicePoolIndex* index = Find(pool)) index->EndRecovery();
}

bool DeviceTier::recovering(DevicePoolNumber pool) const {
  MutexLock lock(&mutex_);
  const DevicePoolIndex* index = Find(pool);
  return index != nullptr && index->recovering();
}

void DeviceTier::TakeBlanks(DevicePoolIndex& pool, HolderId holder, size_t count,
                            std::vector<uint64_t>* slots) {
  while (slots->size() < count) {
    const std::optional<uint64_t> slot = pool.TakeBlank(holder);
    if (!slot) return;
    slots->push_back(*slot);
  }
}

std::vector<DeviceTier::Leaving> DeviceTier::ChooseLeaving(DevicePoolIndex& pool, size_t missing) {
  const auto percent = static_cast<uint64_t>(options_.device.blank_percent_min);
  const uint64_t ahead = pool.slots().total() * percent / 100;
  const uint64_t coming = pool.slots().free() + pool.demoting();
  const size_t wanted = missing + static_cast<size_t>(ahead - std::min(ahead, coming));
  std::vector<Leaving> leaving;
  size_t slots = 0;
  while (slots < wanted) {
    const PageHandle child = leaving.empty() ? kNoPage : leaving.back().page;
    const std::optional<PageHandle> page = pool.BeginDeparture(child, clock_.Now());
    if (!page) break;
    Leaving& chosen = leaving.emplace_back();
    chosen.page = *page;
    for (const Fragment& fragment : pool.table()[*page].fragments) {
      chosen.fragments.push_back(pool.table().MetaOf(pool.table()[*page], fragment));
    }
    slots += chosen.fragments.size();
  }
  return leaving;
}

std::vector<uint64_t> DeviceTier::Reserve(DevicePoolNumber pool, HolderId holder, size_t count) {
  std::vector<uint64_t> slots;
  std::vector<Leaving> leaving;
  {
    MutexLock lock(&mutex_);
    DevicePoolIndex* index = Find(pool);
    if (index == nullptr) return slots;
    TakeBlanks(*index, holder, count, &slots);
    leaving = ChooseLeaving(*index, count - slots.size());
  }
  if (leaving.empty()) return slots;
  const auto has_copy =
      std::stable_partition(leaving.begin(), leaving.end(), [&](const Leaving& page) {
        return !std::all_of(page.fragments.begin(), page.fragments.end(), options_.is_below);
      });
  std::vector<PageTable::Change> changes;
  size_t needed;
  {
    MutexLock lock(&mutex_);
    DevicePoolIndex* index = Find(pool);
    if (index == nullptr) return slots;
    for (auto page = has_copy; page != leaving.end(); ++page) {
      index->EndDeparture(page->page, DevicePoolIndex::Departed::kGone, clock_.Now());
    }
    TakeBlanks(*index, holder, count, &slots);
    needed = count - slots.size();
    changes = index->table().TakeChanges();
  }
  Announce(changes);
  leaving.erase(has_copy, leaving.end());
  Demote(pool, leaving, needed);
  MutexLock lock(&mutex_);
  if (DevicePoolIndex* index = Find(pool)) TakeBlanks(*index, holder, count, &slots);
  return slots;
}

// As many pages, from the first on, as the bound allows.
std::vector<DemotionWork> DeviceTier::BeginDemotions(DevicePoolNumber pool, HolderId holder,
                                                     std::span<const Leaving> leaving,
                                                     size_t* asked) {
  std::vector<DemotionWork> work;
  *asked = 0;
  MutexLock lock(&mutex_);
  DevicePoolIndex* index = Find(pool);
  if (index == nullptr || holder == 0) return work;
  const auto bound = static_cast<size_t>(options_.device.demotions_max);
  for (const Leaving& page : leaving) {
    if (index->demoting() + page.fragments.size() > bound) break;
    for (DemotionWork& one : index->Demote(page.page, holder)) work.push_back(std::move(one));
    ++*asked;
  }
  return work;
}

void DeviceTier::Demote(DevicePoolNumber pool, const std::vector<Leaving>& leaving, size_t needed) {
  if (leaving.empty()) return;
  const HolderId holder = demoters_.choose ? demoters_.choose(pool) : 0;
  size_t asked;
  const std::vector<DemotionWork> work = BeginDemotions(pool, holder, leaving, &asked);
  const bool under_way = !work.empty() && demoters_.ask(pool, holder, work);
  std::vector<PageTable::Change> changes;
  {
    MutexLock lock(&mutex_);
    DevicePoolIndex* index = Find(pool);
    if (index == nullptr) return;
    for (size_t i = under_way ? asked : 0; i < leaving.size(); ++i) {
      const Leaving& page = leaving[i];
      // Its holder may have ended meanwhile, and the departure with it.
      if (i < asked && !index->ForgetDemotion(page.page, holder)) continue;
      const bool goes = needed > 0;
      needed -= std::min(needed, page.fragments.size());
      if (goes) dropped_ += page.fragments.size();
      index->EndDeparture(
          page.page, goes ? DevicePoolIndex::Departed::kGone : DevicePoolIndex::Departed::kStays,
          clock_.Now());
    }
    changes = index->table().TakeChanges();
  }
  Announce(changes);
}

absl::Status DeviceTier::Commit(DevicePoolNumber pool, HolderId holder, uint64_t slot,
                                const std::shared_ptr<const FragmentHeader>& header,
                                uint32_t logical_tile_bytes) {
  absl::Status status;
  std::vector<PageTable::Change> changes;
  {
    MutexLock lock(&mutex_);
    DevicePoolIndex* index = Find(pool);
    if (index == nullptr) return absl::InvalidArgumentError("the pool is gone");
    status = index->Commit(holder, slot, header, logical_tile_bytes, clock_.Now());
    changes = index->table().TakeChanges();
  }
  Announce(changes);
  return status;
}

bool DeviceTier::Claim(DevicePoolNumber pool, HolderId holder, uint64_t slot,
                       const std::shared_ptr<const FragmentHeader>& header,
                       uint32_t logical_tile_bytes) {
  bool claimed;
  std::vector<PageTable::Change> changes;
  {
    MutexLock lock(&mutex_);
    DevicePoolIndex* index = Find(pool);
    if (index == nullptr) return false;
    claimed = index->Claim(holder, slot, header, logical_tile_bytes, clock_.Now());
    changes = index->table().TakeChanges();
  }
  Announce(changes);
  return claimed;
}

std::vector<std::shared_ptr<const FragmentHeader>> DeviceTier::HeadersAt(
    DevicePoolNumber pool, std::span<const uint64_t> slots) const {
  std::vector<std::shared_ptr<const FragmentHeader>> headers;
  headers.reserve(slots.size());
  MutexLock lock(&mutex_);
  const DevicePoolIndex* index = Find(pool);
  for (const uint64_t slot : slots) {
    headers.push_back(index == nullptr ? nullptr : index->PageAt(slot));
  }
  return headers;
}

bool DeviceTier::Withdraw(DevicePoolNumber pool, uint64_t slot, const PageKey& key) {
  std::vector<PageTable::Change> changes;
  {
    MutexLock lock(&mutex_);
    DevicePoolIndex* index = Find(pool);
    if (index == nullptr || !index->Withdraw(slot, key, clock_.Now())) return false;
    ++withdrawn_;
    changes = index->table().TakeChanges();
  }
  Announce(changes);
  return true;
}

size_t DeviceTier::Release(DevicePoolNumber pool, HolderId holder,
                           std::span<const uint64_t> slots) {
  MutexLock lock(&mutex_);
  DevicePoolIndex* index = Find(pool);
  if (index == nullptr) return slots.size();
  return static_cast<size_t>(std::count_if(
      slots.begin(), slots.end(), [&](uint64_t slot) { return !index->Release(holder, slot); }));
}

size_t DeviceTier::ReleaseAllBut(DevicePoolNumber pool, HolderId holder,
                                 std::span<const uint64_t> kept) {
  MutexLock lock(&mutex_);
  DevicePoolIndex* index = Find(pool);
  return index == nullptr ? 0 : index->ReleaseAllBut(holder, kept);
}

size_t DeviceTier::Demoted(DevicePoolNumber pool, HolderId holder,
                           std::span<const uint64_t> slots) {
  size_t unknown = 0;
  std::vector<FragmentMeta> fragments;
  std::vector<PageTable::Change> changes;
  {
    MutexLock lock(&mutex_);
    DevicePoolIndex* index = Find(pool);
    if (index == nullptr) return slots.size();
    for (const uint64_t slot : slots) {
      const auto fragment = index->DemotingAt(holder, slot);
      if (fragment) {
        fragments.push_back(*fragment);
        index->Demoted(holder, slot, clock_.Now());
      } else {
        ++unknown;
      }
    }
    changes = index->table().TakeChanges();
  }
  Announce(changes);
  const auto copied =
      static_cast<uint64_t>(std::count_if(fragments.begin(), fragments.end(), options_.is_below));
  MutexLock lock(&mutex_);
  demoted_ += copied;
  dropped_ += fragments.size() - copied;
  return unknown;
}

void DeviceTier::EndDemotions(HolderId holder) {
  std::vector<PageTable::Change> changes;
  {
    MutexLock lock(&mutex_);
    for (const auto& [number, pool] : pools_) {
      dropped_ += pool->DropDemotions(holder, clock_.Now());
    }
    changes = TakeChanges();
  }
  Announce(changes);
}

void DeviceTier::EndDemotions(DevicePoolNumber pool, HolderId holder) {
  std::vector<PageTable::Change> changes;
  {
    MutexLock lock(&mutex_);
    DevicePoolIndex* index = Find(pool);
    if (index == nullptr) return;
    dropped_ += index->DropDemotions(holder, clock_.Now());
    changes = index->table().TakeChanges();
  }
  Announce(changes);
}

void DeviceTier::EndHolder(HolderId holder) {
  EndDemotions(holder);
  MutexLock lock(&mutex_);
  for (const auto& [number, pool] : pools_) pool->ReleaseAll(holder);
}

size_t DeviceTier::HeldBy(DevicePoolNumber pool, HolderId holder) const {
  MutexLock lock(&mutex_);
  const DevicePoolIndex* index = Find(pool);
  return index == nullptr ? 0 : index->HeldBy(holder);
}

std::vector<PageTable::Change> DeviceTier::TakeChanges() {
  std::vector<PageTable::Change> all;
  for (const auto& [number, pool] : pools_) {
    const auto changes = pool->table().TakeChanges();
    all.insert(all.end(), changes.begin(), changes.end());
  }
  return all;
}

void DeviceTier::Announce(const std::vector<PageTable::Change>& changes) const {
  for (const PageTable::Change& change : changes) {
    const auto& event = change.added ? events_.added : events_.removed;
    if (event) event(change.keyspace, change.key);
  }
}

void DeviceTier::AddStats(StoreStats& stats) const {
  MutexLock lock(&mutex_);
  stats.device = removed_;
  stats.pools = {};
  stats.pools.pools = pools_.size();
  stats.pools.demoted_slots = demoted_;
  stats.pools.dropped_slots = dropped_;
  stats.verify_failures_device = withdrawn_;
  for (const auto& [number, pool] : pools_) {
    AddAll(stats.device, pool->table().Stats());
    stats.pools.handles += pool->slots().handles();
    stats.pools.free_slots += pool->slots().free();
    stats.pools.unknown_slots += pool->slots().unknown();
    stats.pools.blank_slots += pool->blank();
    stats.pools.held_slots += pool->held();
    stats.pools.demoting_slots += pool->demoting();
  }
  for (const auto& [id, lease] : leases_) {
    if (lease.below == 0) ++stats.leases;
    const double age = std::chrono::duration<double>(clock_.Now() - lease.since).count();
    stats.oldest_lease_seconds = std::max(stats.oldest_lease_seconds, age);
  }
}

}  // namespace crumb::storage
