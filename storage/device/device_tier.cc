// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "storage/device/device_tier.h"

#include <algorithm>
#include <string>

#include "common/status_macros.h"

namespace crumb::storage {
namespace {

// Number of evicted pages whose history a policy remembers.
constexpr uint64_t kPolicyPages = 1 << 16;
// Slots that are released while the lock is held once.
constexpr size_t kSlotsPerHold = 4096;

void Add(HistogramSnapshot& to, const HistogramSnapshot& of) {
  if (to.bounds.empty()) {
    to = of;
    return;
  }
  for (size_t i = 0; i < of.counts.size(); ++i) to.counts[i] += of.counts[i];
  to.sum += of.sum;
}

// Adds counters, which only grow, and leaves gauges out.
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
                                                     bool recovering,
                                                     std::optional<SlotMarks> removed_marks) {
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
  index->table().SetPageFragmentsMax(options_.page_fragments_max);
  index->SetRemovedMarks(std::move(removed_marks));
  if (!recovering) index->SetEpoch(options_.epochs.current);
  for (const auto& [keyspace, generation] : generations_) {
    index->table().RaiseGeneration(keyspace, generation);
  }
  pools_.emplace(++last_pool_, std::move(index));
  return last_pool_;
}

std::optional<DeviceTier::TakenPool> DeviceTier::TakePool(DevicePoolNumber pool) {
  TakenPool taken = {pool, nullptr};
  MutexLock lock(&mutex_);
  const auto found = pools_.find(pool);
  if (found == pools_.end()) return taken;
  if (found->second->InUse()) return std::nullopt;
  LeaveToNotes(*found->second);
  taken.index = std::move(found->second);
  pools_.erase(found);
  ending_.emplace(pool, std::as_const(*taken.index).table().Stats());
  return taken;
}

void DeviceTier::LeaveToNotes(DevicePoolIndex& index) const {
  if (index.epoch() == options_.epochs.current) index.SetEpoch(options_.epochs.previous);
}

void DeviceTier::EndPool(TakenPool pool) {
  if (pool.index == nullptr) return;
  PageTable& table = pool.index->table();
  std::vector<PageHandle> pages;
  table.pages().ForEach([&](PageHandle handle, const Page&) { pages.push_back(handle); });
  const TimePoint now = clock_.Now();
  for (const PageHandle page : pages) table.Remove(page, RemovalReason::kCapacity, now);
  {
    MutexLock lock(&mutex_);
    ending_.erase(pool.number);
    AddCounters(removed_, table.Stats());
  }
  Announce(table.TakeChanges());
}

bool DeviceTier::AddHandle(DevicePoolNumber pool, uint32_t number) {
  uint32_t slots;
  {
    MutexLock lock(&mutex_);
    const DevicePoolIndex* index = Find(pool);
    if (index == nullptr || index->slots().HasHandle(number)) return false;
    slots = index->slots().per_handle();
  }
  DevicePoolIndex::HandleRoom room(slots);
  MutexLock lock(&mutex_);
  DevicePoolIndex* index = Find(pool);
  return index != nullptr && index->AddHandle(number, std::move(room));
}

void DeviceTier::EndRecovery(DevicePoolNumber pool) {
  MutexLock lock(&mutex_);
  DevicePoolIndex* index = Find(pool);
  if (index == nullptr) return;
  index->EndRecovery();
  index->SetEpoch(options_.epochs.current);
}

bool DeviceTier::recovering(DevicePoolNumber pool) const {
  MutexLock lock(&mutex_);
  const DevicePoolIndex* index = Find(pool);
  return index != nullptr && index->slots().recovering();
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
  const uint64_t coming = pool.slots().free() + pool.departures().demoting();
  // A part of a large pool is more than one request may look at under the lock; the next ones go
  // on.
  const uint64_t ahead_max = static_cast<uint64_t>(options_.device.demotions_max);
  const size_t wanted = missing + std::min(ahead - std::min(ahead, coming), ahead_max);
  std::vector<Leaving> leaving;
  size_t slots = 0;
  while (slots < wanted) {
    const PageHandle child = leaving.empty() ? kNoPage : leaving.back().departure.page;
    const auto departure = pool.departures().Begin(child, clock_.Now());
    if (!departure) break;
    Leaving& chosen = leaving.emplace_back();
    chosen.departure = *departure;
    const Page& page = pool.table()[departure->page];
    for (const Fragment& fragment : page.fragments) {
      chosen.fragments.push_back(page.MetaOf(fragment));
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
      index->departures().End(page->departure, PoolDepartures::Departed::kGone, clock_.Now());
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

// Begins the copies of the first pages of `leaving`, as many as the bound on copies allows.
std::vector<DemotionWork> DeviceTier::BeginDemotions(DevicePoolNumber pool, HolderId holder,
                                                     std::span<const Leaving> leaving,
                                                     size_t* requested) {
  std::vector<DemotionWork> work;
  *requested = 0;
  MutexLock lock(&mutex_);
  DevicePoolIndex* index = Find(pool);
  if (index == nullptr || holder == 0) return work;
  const auto bound = static_cast<size_t>(options_.device.demotions_max);
  for (const Leaving& page : leaving) {
    if (index->departures().demoting() + page.fragments.size() > bound) break;
    for (const uint64_t slot : index->departures().Demote(page.departure, holder)) {
      work.push_back({slot, index->PageAt(slot)});
    }
    ++*requested;
  }
  return work;
}

void DeviceTier::Demote(DevicePoolNumber pool, const std::vector<Leaving>& leaving, size_t needed) {
  if (leaving.empty()) return;
  const HolderId holder = demoters_.choose ? demoters_.choose(pool) : 0;
  size_t requested;
  const std::vector<DemotionWork> work = BeginDemotions(pool, holder, leaving, &requested);
  const bool under_way = !work.empty() && demoters_.request(pool, holder, work);
  std::vector<PageTable::Change> changes;
  {
    MutexLock lock(&mutex_);
    DevicePoolIndex* index = Find(pool);
    if (index == nullptr) return;
    for (size_t i = under_way ? requested : 0; i < leaving.size(); ++i) {
      const Leaving& page = leaving[i];
      // Its holder may have ended meanwhile, and the departure with it.
      if (i < requested && !index->departures().ForgetDemotion(page.departure)) continue;
      const bool goes = needed > 0;
      needed -= std::min(needed, page.fragments.size());
      if (goes) dropped_ += page.fragments.size();
      index->departures().End(
          page.departure, goes ? PoolDepartures::Departed::kGone : PoolDepartures::Departed::kStays,
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
                       std::shared_ptr<const FragmentHeader> header, uint32_t logical_tile_bytes) {
  bool claimed;
  std::vector<PageTable::Change> changes;
  {
    MutexLock lock(&mutex_);
    DevicePoolIndex* index = Find(pool);
    if (index == nullptr) return false;
    const bool is_withheld =
        header != nullptr && (!options_.epochs.Knows(index->epoch()) || MayBeDeleted(*header));
    if (is_withheld) header = nullptr;
    claimed = index->Claim(holder, slot, std::move(header), logical_tile_bytes, clock_.Now());
    if (claimed && is_withheld && index->PageAt(slot) == nullptr) index->MarkRemoved(slot);
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
  std::vector<uint64_t> stay(kept.begin(), kept.end());
  std::sort(stay.begin(), stay.end());
  std::vector<uint64_t> slots;
  {
    MutexLock lock(&mutex_);
    const DevicePoolIndex* index = Find(pool);
    if (index == nullptr) return 0;
    slots = index->HeldSlots(holder);
  }
  std::erase_if(slots,
                [&](uint64_t slot) { return std::binary_search(stay.begin(), stay.end(), slot); });
  size_t unknown = 0;
  for (size_t first = 0; first < slots.size(); first += kSlotsPerHold) {
    const size_t count = std::min(kSlotsPerHold, slots.size() - first);
    unknown += Release(pool, holder, std::span(slots).subspan(first, count));
  }
  return slots.size() - unknown;
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
      const auto fragment = index->departures().DemotingAt(holder, slot);
      if (fragment) {
        fragments.push_back(*fragment);
        index->departures().Demoted(holder, slot, clock_.Now());
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
  for (const DevicePoolNumber pool : Numbers()) EndDemotions(pool, holder);
}

void DeviceTier::EndDemotions(DevicePoolNumber pool, HolderId holder) {
  std::vector<PageTable::Change> changes;
  {
    MutexLock lock(&mutex_);
    DevicePoolIndex* index = Find(pool);
    if (index == nullptr) return;
    dropped_ += index->departures().DropDemotions(holder, clock_.Now());
    changes = index->table().TakeChanges();
  }
  Announce(changes);
}

// The holds of an ended process are forgotten at once and undone in pieces: until the last one the
// pool counts as held.
void DeviceTier::EndHolder(HolderId holder) {
  for (const DevicePoolNumber pool : Numbers()) {
    EndDemotions(pool, holder);
    std::vector<uint64_t> slots;
    {
      MutexLock lock(&mutex_);
      DevicePoolIndex* index = Find(pool);
      if (index == nullptr) continue;
      slots = index->TakeHolds(holder);
    }
    for (size_t first = 0; first < slots.size(); first += kSlotsPerHold) {
      const size_t count = std::min(kSlotsPerHold, slots.size() - first);
      MutexLock lock(&mutex_);
      Find(pool)->EndHolds(std::span(slots).subspan(first, count));  // held, so it is there
    }
  }
}

size_t DeviceTier::HeldBy(DevicePoolNumber pool, HolderId holder) const {
  MutexLock lock(&mutex_);
  const DevicePoolIndex* index = Find(pool);
  return index == nullptr ? 0 : index->HeldBy(holder);
}

std::vector<DevicePoolNumber> DeviceTier::Numbers() const {
  std::vector<DevicePoolNumber> numbers;
  MutexLock lock(&mutex_);
  for (const auto& [number, pool] : pools_) numbers.push_back(number);
  return numbers;
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
  for (const auto& [number, ended] : ending_) AddCounters(stats.device, ended);
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
    stats.pools.demoting_slots += pool->departures().demoting();
  }
}

}  // namespace crumb::storage
