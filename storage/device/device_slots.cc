// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "storage/device/device_slots.h"

#include <algorithm>
#include <utility>

#include "common/status_macros.h"
#include "storage/policy/policy.h"

namespace crumb::storage {
namespace {

// Number of evicted pages whose history a policy remembers.
constexpr uint64_t kPolicyPages = 1 << 16;
// Slots that are released while the lock is held once.
constexpr size_t kSlotsPerHold = 4096;

}  // namespace

absl::StatusOr<DevicePoolNumber> DeviceSlots::AddPool(uint64_t slot_bytes, uint64_t handle_bytes,
                                                      bool recovering,
                                                      std::optional<SlotMarks> removed_marks) {
  if (slot_bytes == 0 || slot_bytes % kTileAlignment != 0 || slot_bytes > UINT32_MAX ||
      handle_bytes < slot_bytes || handle_bytes / slot_bytes > UINT32_MAX) {
    return absl::InvalidArgumentError(
        "slot_bytes must be a multiple of 128 below 4 GiB and fit into handle_bytes, 2^32 times at "
        "most");
  }
  CRUMB_ASSIGN_OR_RETURN(auto policy, MakePolicy(state_.options.device.policy, kPolicyPages));
  MutexLock lock(&state_.mutex);
  auto index = std::make_unique<DevicePoolIndex>(
      std::move(policy), static_cast<uint32_t>(slot_bytes), handle_bytes, recovering);
  index->table().SetPageFragmentsMax(state_.options.page_fragments_max);
  index->SetRemovedMarks(std::move(removed_marks));
  if (!recovering) index->SetEpoch(state_.options.epochs.current);
  for (const auto& [keyspace, generation] : state_.generations) {
    index->table().RaiseGeneration(keyspace, generation);
  }
  state_.pools.emplace(++state_.last_pool, std::move(index));
  return state_.last_pool;
}

std::optional<DeviceSlots::TakenPool> DeviceSlots::TakePool(DevicePoolNumber pool) {
  TakenPool taken = {pool, nullptr};
  MutexLock lock(&state_.mutex);
  const auto found = state_.pools.find(pool);
  if (found == state_.pools.end()) return taken;
  if (found->second->InUse()) return std::nullopt;
  state_.LeaveToNotes(*found->second);
  taken.index = std::move(found->second);
  state_.pools.erase(found);
  state_.ending.emplace(pool, std::as_const(*taken.index).table().Stats());
  return taken;
}

void DeviceSlots::EndPool(TakenPool pool) {
  if (pool.index == nullptr) return;
  PageTable& table = pool.index->table();
  std::vector<PageHandle> pages;
  table.pages().ForEach([&](PageHandle handle, const Page&) { pages.push_back(handle); });
  const TimePoint now = state_.clock.Now();
  for (const PageHandle page : pages) table.Remove(page, RemovalReason::kCapacity, now);
  {
    MutexLock lock(&state_.mutex);
    state_.ending.erase(pool.number);
    AddCounters(state_.removed, table.Stats());
  }
  state_.Announce(table.TakeChanges());
}

bool DeviceSlots::AddHandle(DevicePoolNumber pool, uint32_t number) {
  uint32_t slots;
  {
    MutexLock lock(&state_.mutex);
    const DevicePoolIndex* index = state_.Find(pool);
    if (index == nullptr || index->slots().HasHandle(number)) return false;
    slots = index->slots().per_handle();
  }
  DevicePoolIndex::HandleRoom room(slots);
  MutexLock lock(&state_.mutex);
  DevicePoolIndex* index = state_.Find(pool);
  return index != nullptr && index->AddHandle(number, std::move(room));
}

void DeviceSlots::EndRecovery(DevicePoolNumber pool) {
  MutexLock lock(&state_.mutex);
  DevicePoolIndex* index = state_.Find(pool);
  if (index == nullptr) return;
  index->EndRecovery();
  index->SetEpoch(state_.options.epochs.current);
}

bool DeviceSlots::recovering(DevicePoolNumber pool) const {
  MutexLock lock(&state_.mutex);
  const DevicePoolIndex* index = state_.Find(pool);
  return index != nullptr && index->slots().recovering();
}

void DeviceSlots::TakeBlanks(DevicePoolIndex& pool, HolderId holder, size_t count,
                             std::vector<uint64_t>* slots) {
  while (slots->size() < count) {
    const std::optional<uint64_t> slot = pool.TakeBlank(holder);
    if (!slot) return;
    slots->push_back(*slot);
  }
}

std::vector<DeviceSlots::Leaving> DeviceSlots::ChooseLeaving(DevicePoolIndex& pool,
                                                             size_t missing) {
  const auto percent = static_cast<uint64_t>(state_.options.device.blank_percent_min);
  const uint64_t ahead = pool.slots().total() * percent / 100;
  const uint64_t coming = pool.slots().free() + pool.departures().demoting();
  // A part of a large pool is more than one request may look at under the lock; the next ones go
  // on.
  const uint64_t ahead_max = static_cast<uint64_t>(state_.options.device.demotions_max);
  const size_t wanted = missing + std::min(ahead - std::min(ahead, coming), ahead_max);
  std::vector<Leaving> leaving;
  size_t slots = 0;
  while (slots < wanted) {
    const PageHandle child = leaving.empty() ? kNoPage : leaving.back().departure.page;
    const auto departure = pool.departures().Begin(child, state_.clock.Now());
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

std::vector<uint64_t> DeviceSlots::Reserve(DevicePoolNumber pool, HolderId holder, size_t count) {
  std::vector<uint64_t> slots;
  std::vector<Leaving> leaving;
  {
    MutexLock lock(&state_.mutex);
    DevicePoolIndex* index = state_.Find(pool);
    if (index == nullptr) return slots;
    TakeBlanks(*index, holder, count, &slots);
    leaving = ChooseLeaving(*index, count - slots.size());
  }
  if (leaving.empty()) return slots;
  const auto has_copy =
      std::stable_partition(leaving.begin(), leaving.end(), [&](const Leaving& page) {
        return !std::all_of(page.fragments.begin(), page.fragments.end(), state_.options.is_below);
      });
  std::vector<PageTable::Change> changes;
  size_t needed;
  {
    MutexLock lock(&state_.mutex);
    DevicePoolIndex* index = state_.Find(pool);
    if (index == nullptr) return slots;
    for (auto page = has_copy; page != leaving.end(); ++page) {
      index->departures().End(page->departure, PoolDepartures::Departed::kGone, state_.clock.Now());
    }
    TakeBlanks(*index, holder, count, &slots);
    needed = count - slots.size();
    changes = index->table().TakeChanges();
  }
  state_.Announce(changes);
  leaving.erase(has_copy, leaving.end());
  Demote(pool, leaving, needed);
  MutexLock lock(&state_.mutex);
  if (DevicePoolIndex* index = state_.Find(pool)) TakeBlanks(*index, holder, count, &slots);
  return slots;
}

// Begins the copies of the first pages of `leaving`, as many as the bound on copies allows.
std::vector<DemotionWork> DeviceSlots::BeginDemotions(DevicePoolNumber pool, HolderId holder,
                                                      std::span<const Leaving> leaving,
                                                      size_t* requested) {
  std::vector<DemotionWork> work;
  *requested = 0;
  MutexLock lock(&state_.mutex);
  DevicePoolIndex* index = state_.Find(pool);
  if (index == nullptr || holder == 0) return work;
  const auto bound = static_cast<size_t>(state_.options.device.demotions_max);
  for (const Leaving& page : leaving) {
    if (index->departures().demoting() + page.fragments.size() > bound) break;
    for (const uint64_t slot : index->departures().Demote(page.departure, holder)) {
      work.push_back({slot, index->PageAt(slot)});
    }
    ++*requested;
  }
  return work;
}

void DeviceSlots::Demote(DevicePoolNumber pool, const std::vector<Leaving>& leaving,
                         size_t needed) {
  if (leaving.empty()) return;
  const HolderId holder = demoters_.choose ? demoters_.choose(pool) : 0;
  size_t requested;
  const std::vector<DemotionWork> work = BeginDemotions(pool, holder, leaving, &requested);
  const bool under_way = !work.empty() && demoters_.request(pool, holder, work);
  std::vector<PageTable::Change> changes;
  {
    MutexLock lock(&state_.mutex);
    DevicePoolIndex* index = state_.Find(pool);
    if (index == nullptr) return;
    for (size_t i = under_way ? requested : 0; i < leaving.size(); ++i) {
      const Leaving& page = leaving[i];
      // Its holder may have ended meanwhile, and the departure with it.
      if (i < requested && !index->departures().ForgetDemotion(page.departure)) continue;
      const bool goes = needed > 0;
      needed -= std::min(needed, page.fragments.size());
      if (goes) state_.dropped += page.fragments.size();
      index->departures().End(
          page.departure, goes ? PoolDepartures::Departed::kGone : PoolDepartures::Departed::kStays,
          state_.clock.Now());
    }
    changes = index->table().TakeChanges();
  }
  state_.Announce(changes);
}

absl::Status DeviceSlots::Commit(DevicePoolNumber pool, HolderId holder, uint64_t slot,
                                 const std::shared_ptr<const FragmentHeader>& header,
                                 uint32_t logical_tile_bytes) {
  absl::Status status;
  std::vector<PageTable::Change> changes;
  {
    MutexLock lock(&state_.mutex);
    DevicePoolIndex* index = state_.Find(pool);
    if (index == nullptr) return absl::InvalidArgumentError("the pool is gone");
    status = index->Commit(holder, slot, header, logical_tile_bytes, state_.clock.Now());
    changes = index->table().TakeChanges();
  }
  state_.Announce(changes);
  return status;
}

bool DeviceSlots::Claim(DevicePoolNumber pool, HolderId holder, uint64_t slot,
                        std::shared_ptr<const FragmentHeader> header, uint32_t logical_tile_bytes) {
  bool claimed;
  std::vector<PageTable::Change> changes;
  {
    MutexLock lock(&state_.mutex);
    DevicePoolIndex* index = state_.Find(pool);
    if (index == nullptr) return false;
    const bool is_withheld = header != nullptr && (!state_.options.epochs.Knows(index->epoch()) ||
                                                   state_.MayBeDeleted(*header));
    if (is_withheld) header = nullptr;
    claimed = index->Claim(holder, slot, std::move(header), logical_tile_bytes, state_.clock.Now());
    if (claimed && is_withheld && index->PageAt(slot) == nullptr) index->MarkRemoved(slot);
    changes = index->table().TakeChanges();
  }
  state_.Announce(changes);
  return claimed;
}

std::vector<std::shared_ptr<const FragmentHeader>> DeviceSlots::HeadersAt(
    DevicePoolNumber pool, std::span<const uint64_t> slots) const {
  std::vector<std::shared_ptr<const FragmentHeader>> headers;
  headers.reserve(slots.size());
  MutexLock lock(&state_.mutex);
  const DevicePoolIndex* index = state_.Find(pool);
  for (const uint64_t slot : slots) {
    headers.push_back(index == nullptr ? nullptr : index->PageAt(slot));
  }
  return headers;
}

bool DeviceSlots::Withdraw(DevicePoolNumber pool, uint64_t slot, const PageKey& key) {
  std::vector<PageTable::Change> changes;
  {
    MutexLock lock(&state_.mutex);
    DevicePoolIndex* index = state_.Find(pool);
    if (index == nullptr || !index->Withdraw(slot, key, state_.clock.Now())) return false;
    ++state_.withdrawn;
    changes = index->table().TakeChanges();
  }
  state_.Announce(changes);
  return true;
}

size_t DeviceSlots::Release(DevicePoolNumber pool, HolderId holder,
                            std::span<const uint64_t> slots) {
  MutexLock lock(&state_.mutex);
  DevicePoolIndex* index = state_.Find(pool);
  if (index == nullptr) return slots.size();
  return static_cast<size_t>(std::count_if(
      slots.begin(), slots.end(), [&](uint64_t slot) { return !index->Release(holder, slot); }));
}

size_t DeviceSlots::ReleaseAllBut(DevicePoolNumber pool, HolderId holder,
                                  std::span<const uint64_t> kept) {
  std::vector<uint64_t> stay(kept.begin(), kept.end());
  std::sort(stay.begin(), stay.end());
  std::vector<uint64_t> slots;
  {
    MutexLock lock(&state_.mutex);
    const DevicePoolIndex* index = state_.Find(pool);
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

size_t DeviceSlots::Demoted(DevicePoolNumber pool, HolderId holder,
                            std::span<const uint64_t> slots) {
  size_t unknown = 0;
  std::vector<FragmentMeta> fragments;
  std::vector<PageTable::Change> changes;
  {
    MutexLock lock(&state_.mutex);
    DevicePoolIndex* index = state_.Find(pool);
    if (index == nullptr) return slots.size();
    for (const uint64_t slot : slots) {
      const auto fragment = index->departures().DemotingAt(holder, slot);
      if (fragment) {
        fragments.push_back(*fragment);
        index->departures().Demoted(holder, slot, state_.clock.Now());
      } else {
        ++unknown;
      }
    }
    changes = index->table().TakeChanges();
  }
  state_.Announce(changes);
  const auto copied = static_cast<uint64_t>(
      std::count_if(fragments.begin(), fragments.end(), state_.options.is_below));
  MutexLock lock(&state_.mutex);
  state_.demoted += copied;
  state_.dropped += fragments.size() - copied;
  return unknown;
}

void DeviceSlots::EndDemotions(HolderId holder) {
  for (const DevicePoolNumber pool : state_.Numbers()) EndDemotions(pool, holder);
}

void DeviceSlots::EndDemotions(DevicePoolNumber pool, HolderId holder) {
  std::vector<PageTable::Change> changes;
  {
    MutexLock lock(&state_.mutex);
    DevicePoolIndex* index = state_.Find(pool);
    if (index == nullptr) return;
    state_.dropped += index->departures().DropDemotions(holder, state_.clock.Now());
    changes = index->table().TakeChanges();
  }
  state_.Announce(changes);
}

// The holds of an ended process are forgotten at once and undone in pieces: until the last one the
// pool counts as held.
void DeviceSlots::EndHolder(HolderId holder) {
  for (const DevicePoolNumber pool : state_.Numbers()) {
    EndDemotions(pool, holder);
    std::vector<uint64_t> slots;
    {
      MutexLock lock(&state_.mutex);
      DevicePoolIndex* index = state_.Find(pool);
      if (index == nullptr) continue;
      slots = index->TakeHolds(holder);
    }
    for (size_t first = 0; first < slots.size(); first += kSlotsPerHold) {
      const size_t count = std::min(kSlotsPerHold, slots.size() - first);
      MutexLock lock(&state_.mutex);
      state_.Find(pool)->EndHolds(std::span(slots).subspan(first, count));  // held, so it is there
    }
  }
}

size_t DeviceSlots::HeldBy(DevicePoolNumber pool, HolderId holder) const {
  MutexLock lock(&state_.mutex);
  const DevicePoolIndex* index = state_.Find(pool);
  return index == nullptr ? 0 : index->HeldBy(holder);
}

}  // namespace crumb::storage
