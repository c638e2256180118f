// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
// Slabs of tenants: docs/adr/0009-tenants-and-shared-memory.md.
#include "storage/host/host_room.h"

#include <algorithm>
#include <memory>
#include <utility>

#include "common/logging.h"
#include "common/status_macros.h"
#include "storage/bounds.h"

namespace crumb::storage {
namespace {

// A search for room releases the lock after so many evictions, or pages looked at; 64 and 1,024
// take some 50 us each.
constexpr size_t kEvictionsPerHold = 64;
constexpr size_t kVictimStepsPerHold = 1024;
// After so many pages without children that are in use, a search looks at those with children.
constexpr size_t kLeafStepsMax = EvictionOrder::kVictimStepsMax / 2;
// Pages of closing slabs that leave, or are looked at, before other callers get the lock. A chunk
// of slots is finished first.
constexpr size_t kClosingEvictionsPerHold = 256;
constexpr size_t kClosingStepsPerHold = 4096;
// Slabs that one reservation tries to make fresh: bounds its system calls.
constexpr size_t kSlabTriesMax = 8;
// Free memory that must be left when a slab takes its memory again, unless there was less before.
constexpr uint64_t kFreeMin = uint64_t{64} << 20;
// Measures of free memory lag behind and count others' allocations: a sixteenth of a slab may be
// missing in them.
constexpr uint64_t kFreeNoiseFraction = 16;

uint64_t BytesAbsentBelow(const Page& page) {
  uint64_t bytes = 0;
  for (const Fragment& fragment : page.fragments) {
    if (fragment.below == Below::kAbsent) bytes += fragment.bytes;
  }
  return bytes;
}

void KeepEachOnce(std::vector<PageHandle>* pages) {
  std::sort(pages->begin(), pages->end());
  pages->erase(std::unique(pages->begin(), pages->end()), pages->end());
}

}  // namespace

absl::StatusOr<Slot> HostRoom::Reserve(const KeyspaceId& keyspace, uint64_t bytes,
                                       MayDepart may_depart, std::vector<Departure>* departures) {
  if (bytes > state_.memory->slab_bytes()) {
    return absl::InvalidArgumentError("a fragment of " + std::to_string(bytes) +
                                      " bytes is larger than a slab: raise host.slab_bytes");
  }
  Demotion demotion = {state_.clock.Now(), may_depart, departures};
  Search search = {.bytes = bytes};
  bool tenants = false;
  for (bool first = true; first || (!tenants && search.goes_on()); first = false) {
    std::vector<PageTable::Change> changes;
    {
      MutexLock lock(&state_.mutex);
      search.partition = state_.table.pages().PartitionOf(keyspace);
      state_.slabs.NoteUse(search.partition, demotion.now);
      search.slot = state_.slabs.Allocate(bytes, search.partition);
      tenants = state_.table.order().partitions() > 1;
      if (!search.slot && !tenants) EvictFor(search, demotion);
      changes = state_.table.TakeChanges();
    }
    state_.Announce(changes);
  }
  if (!search.slot && tenants) AllocateFromOthers(search, demotion);
  if (!search.slot) {
    return absl::ResourceExhaustedError(
        "host memory is full, and every page in it is leased, pinned or being written: repeat the "
        "call later");
  }
  return *search.slot;
}

void HostRoom::Abandon(const Slot& slot) {
  MutexLock lock(&state_.mutex);
  state_.slabs.Free(slot);
}

void HostRoom::EvictFor(Search& search, Demotion& demotion) {
  for (size_t evicted = 0; evicted < kEvictionsPerHold; ++evicted) {
    if (!EvictOne(search, demotion)) return;
    search.slot = state_.slabs.Allocate(search.bytes, search.partition);
    if (search.slot) return;
    EmptyChunkFor(search, demotion.now);
    search.slot = state_.slabs.Allocate(search.bytes, search.partition);
    if (search.slot) return;
  }
}

bool HostRoom::EvictOne(Search& search, Demotion& demotion) {
  // Nothing of its own: no search would find a victim.
  const bool inherits = state_.inherited.held_bytes() > 0;
  if (inherits && state_.slots.own().used_bytes() == 0) {
    search.ended = true;
    return false;
  }
  // No page can be written to the slots of an adopted slab.
  const auto may_go = [&](const Page& page) {
    return !inherits ||
           std::any_of(page.fragments.begin(), page.fragments.end(), [&](const Fragment& fragment) {
             return !state_.inherited.Holds(fragment.slot.region);
           });
  };
  for (size_t left = kVictimStepsPerHold; left > 0;) {
    size_t steps = left;
    std::optional<PageHandle> victim;
    if (search.steps < kLeafStepsMax) {
      victim = state_.table.order().Victim(demotion.now, may_go, search.partition, steps);
    }
    if (!victim && steps > 0) {
      victim = state_.table.order().InnerVictim(demotion.now, may_go, search.partition,
                                                search.above, steps);
    }
    search.steps += left - steps;
    left = steps;
    if (!victim) {
      search.ended = steps > 0 || search.steps >= EvictionOrder::kVictimStepsMax;
      return false;
    }
    if (Evict(*victim, demotion)) {
      search.steps = 0;
      return true;
    }
  }
  return false;
}

bool HostRoom::Evict(PageHandle page, Demotion& demotion) {
  const Page& leaving = state_.table[page];
  const bool worth_keeping = !state_.options.demote_only_hit || leaving.was_hit;
  const uint64_t absent_bytes = BytesAbsentBelow(leaving);
  if (absent_bytes == 0 || !worth_keeping || !demotion.may_depart(leaving.keyspace, absent_bytes)) {
    state_.table.Remove(page, RemovalReason::kCapacity, demotion.now);
    return true;
  }
  state_.Depart(page, demotion.departures);
  return false;
}

void HostRoom::EmptyChunkFor(const Search& search, TimePoint now) {
  std::vector<PageHandle> owners =
      state_.slots.own().OwnersOfNearlyEmptyChunk(search.bytes, search.partition);
  KeepEachOnce(&owners);
  for (const PageHandle owner : owners) {
    const Page& page = state_.table[owner];
    if (!page.resident || page.references > 0 || page.pinned_until > now ||
        BytesAbsentBelow(page) > 0) {
      return;
    }
  }
  for (const PageHandle owner : owners) {
    state_.table.Remove(owner, RemovalReason::kCapacity, now);
  }
}

absl::Status HostRoom::SetTenant(const KeyspaceId& keyspace, const std::string& tenant) {
  if (state_.memory->sharing() != SlabMemory::Sharing::kByTenant) {
    return absl::FailedPreconditionError("the store was opened without slabs of tenants");
  }
  std::unique_ptr<EvictionPolicy> policy;  // policy of a new partition, made outside the lock
  if (!state_.HasPartition(tenant)) {
    CRUMB_ASSIGN_OR_RETURN(policy, state_.NewPolicy());
  }
  const TimePoint now = state_.clock.Now();
  for (bool moved = false; !moved;) {
    std::vector<PageTable::Change> changes;
    {
      MutexLock lock(&state_.mutex);
      const uint32_t partition = state_.PartitionOfTenant(tenant, std::move(policy));
      if (state_.table.pages().PartitionOf(keyspace) == partition) return absl::OkStatus();
      const auto pages =
          state_.table.pages().PagesOlderThan(keyspace, UINT64_MAX, kHostRemovalsPerHold);
      for (const PageHandle page : pages) {
        state_.table.Remove(page, RemovalReason::kCapacity, now);
      }
      moved = pages.size() < kHostRemovalsPerHold;
      if (moved) state_.table.SetPartition(keyspace, partition);
      changes = state_.table.TakeChanges();
    }
    state_.Announce(changes);
  }
  return absl::OkStatus();
}

absl::StatusOr<UniqueFd> HostRoom::OpenSlab(uint32_t slab, const KeyspaceId& keyspace) const {
  MutexLock lock(&state_.mutex);
  const uint32_t region = state_.RegionOf(slab);
  const uint32_t partition = state_.table.pages().PartitionOf(keyspace);
  if (state_.inherited.Holds(slab) && state_.inherited.partition(slab) == partition) {
    return state_.inherited.OpenReader(slab);
  }
  const bool there = region < state_.slabs.size() && slab == state_.NumberOf(region) &&
                     state_.slabs[region].InTable();
  if (!there || !state_.slabs[region].written || state_.slabs[region].partition != partition) {
    return absl::PermissionDeniedError("the slab is not of the keyspace's tenant");
  }
  return state_.memory->OpenReader(region);
}

void HostRoom::AllocateFromOthers(Search& search, Demotion& demotion) {
  std::vector<uint32_t> tried;
  while (true) {
    std::optional<uint32_t> taken;
    std::vector<uint32_t> gone;
    std::vector<PageTable::Change> changes;
    bool more = false;
    {
      MutexLock lock(&state_.mutex);
      search.slot = state_.slabs.Allocate(search.bytes, search.partition);
      if (!search.slot && tried.size() < kSlabTriesMax) {
        taken = TakeSlab(search.partition, demotion, tried, &gone, &more);
      }
      if (!search.slot && !taken && !more) EvictFor(search, demotion);
      changes = state_.table.TakeChanges();
    }
    state_.Announce(changes);
    ReportGone(gone);
    if (more || (!taken && search.goes_on())) continue;
    if (!taken) return;
    if (MakeFresh(*taken)) {
      MutexLock lock(&state_.mutex);
      state_.slabs.Give(*taken, search.partition, state_.clock.Now());
      search.slot = state_.slabs.Allocate(search.bytes, search.partition);
      return;
    }
    tried.push_back(*taken);
  }
}

void HostRoom::ReportGone(std::span<const uint32_t> gone) const {
  if (!state_.options.slab_gone) return;
  for (const uint32_t number : gone) state_.options.slab_gone(number);
}

std::optional<uint32_t> HostRoom::TakeSlab(uint32_t partition, Demotion& demotion,
                                           std::span<const uint32_t> tried,
                                           std::vector<uint32_t>* gone, bool* more) {
  *more = EmptyClosing(demotion, gone);
  if (*more) return std::nullopt;
  const SlabOwners::Parts parts = state_.slabs.CountParts(partition);
  if (SlabOwners::KeepsItsPart(parts)) return std::nullopt;
  if (state_.slabs.MayTakeIdle(parts)) {
    const size_t gone_before = gone->size();
    const auto slab = TakeIdle(partition, demotion.now, tried, gone);
    if (slab || gone->size() > gone_before) return slab;
  }
  if (!state_.slabs.CloseOneFor(parts, demotion.now)) return std::nullopt;
  *more = EmptyClosing(demotion, gone);
  if (*more) return std::nullopt;
  return state_.slabs.TakeUnused(tried, demotion.now);
}

std::optional<uint32_t> HostRoom::TakeIdle(uint32_t partition, TimePoint now,
                                           std::span<const uint32_t> tried,
                                           std::vector<uint32_t>* gone) {
  if (const auto slab = state_.slabs.TakeUnused(tried, now)) return slab;
  const auto idle = state_.slabs.GiveUpIdle(partition, now);
  if (!idle) return std::nullopt;
  gone->push_back(state_.NumberOf(*idle));
  return state_.slabs.TakeUnused(tried, now);
}

bool HostRoom::TakeIdleSlab(PageHandle page) {
  std::vector<uint32_t> tried;
  while (tried.size() < kSlabTriesMax) {
    std::vector<uint32_t> gone;
    std::optional<uint32_t> taken;
    uint32_t partition = 0;
    {
      MutexLock lock(&state_.mutex);
      if (state_.table.order().partitions() == 1 || !state_.table[page].resident) return false;
      partition = state_.table.pages().PartitionOf(state_.table[page].keyspace);
      taken = TakeIdle(partition, state_.clock.Now(), tried, &gone);
    }
    ReportGone(gone);
    if (!taken) return false;
    if (MakeFresh(*taken)) {
      MutexLock lock(&state_.mutex);
      state_.slabs.Give(*taken, partition, state_.clock.Now());
      return true;
    }
    tried.push_back(*taken);
  }
  return false;
}

bool HostRoom::EmptyClosing(Demotion& demotion, std::vector<uint32_t>* gone) {
  size_t steps = 0;
  size_t evictions = 0;
  std::vector<PageHandle> owners;
  for (const uint32_t slab : state_.slabs.Closing(demotion.now)) {
    while (state_.slabs.NextClosing(slab, owners)) {
      for (const PageHandle owner : owners) {
        // A page that left for its first slot here is not resident, and one that departs has
        // references: neither is evicted twice.
        const Page& page = state_.table[owner];
        if (!page.resident || page.references > 0 || page.pinned_until > demotion.now) continue;
        ++evictions;
        Evict(owner, demotion);
      }
      steps += owners.size();
      if (steps >= kClosingStepsPerHold || evictions >= kClosingEvictionsPerHold) return true;
    }
    if (state_.slabs.GiveUp(slab, demotion.now)) gone->push_back(state_.NumberOf(slab));
  }
  return false;
}

bool HostRoom::DropFile(uint32_t slab) {
  const auto& free_memory = state_.options.free_memory;
  const uint64_t free_before = free_memory ? free_memory() : UINT64_MAX;
  const SlabMemory::Drop drop = state_.memory->TryDrop(slab);
  bool may_revoke = false;
  if (drop != SlabMemory::Drop::kDropped) {
    MutexLock lock(&state_.mutex);
    may_revoke = state_.slabs.MayRevoke(slab, state_.clock.Now());
  }
  // Memory that is not shown to be free may be in use outside for as long as it is pinned there,
  // which nothing can find out later: so it is counted, and limited.
  bool revoked = false;
  if (may_revoke) {
    const absl::Status status = state_.memory->Revoke(slab);
    revoked = status.ok();
    LogWarning(
        "host tier: slab {} is taken from processes that did not let it go within "
        "store.host.let_go_timeout: {}",
        slab, status.ToString());
  }
  MutexLock lock(&state_.mutex);
  state_.slabs.EndDrop(slab, drop, revoked, free_before, state_.clock.Now());
  return state_.slabs[slab].dropped;
}

bool HostRoom::MakeFresh(uint32_t slab) {
  bool dropped = false;
  {
    MutexLock lock(&state_.mutex);
    if (!state_.slabs[slab].written) return true;  // no process was ever given its file
    dropped = state_.slabs[slab].dropped;
  }
  bool fresh = false;
  if (dropped || DropFile(slab)) {
    uint64_t free_before = 0;
    {
      MutexLock lock(&state_.mutex);
      free_before = state_.slabs[slab].free_before;
    }
    const absl::Status renewed = state_.memory->Renew(slab, [&](uint64_t bytes) {
      if (!state_.options.free_memory) return true;
      return state_.options.free_memory() + bytes / kFreeNoiseFraction >=
             bytes + std::min(free_before, kFreeMin);
    });
    fresh = renewed.ok();
    if (!fresh) LogWarning("host tier: slab {} stays out of use: {}", slab, renewed.ToString());
  }
  MutexLock lock(&state_.mutex);
  state_.slabs.EndRenewal(slab, fresh, state_.clock.Now());
  return fresh;
}

}  // namespace crumb::storage
