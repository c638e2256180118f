// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
// Slabs of tenants: docs/adr/0009-tenants-and-shared-memory.md.
#include <algorithm>
#include <cstring>
#include <map>

#include "common/status_macros.h"
#include "storage/host_tier.h"

namespace crumb::storage {
namespace {

// How long a share keeps its only slab before a share without any may take it.
constexpr Duration kOnlySlabMin = std::chrono::seconds(10);

}  // namespace

absl::Status HostTier::SetTenant(const KeyspaceId& keyspace, const std::string& tenant) {
  CRUMB_RETURN_IF_ERROR(memory_->HasReaders(0).status());
  CRUMB_ASSIGN_OR_RETURN(
      auto policy, MakePolicy(options_.host.policy, capacity_bytes() / kTypicalPageBytes + 1));
  const TimePoint now = clock_.Now();
  std::vector<PageTable::Change> changes;
  {
    MutexLock lock(&mutex_);
    const uint32_t share = ShareOfTenant(tenant, std::move(policy));
    if (table_.ShareOf(keyspace) == share) return absl::OkStatus();
    for (const PageHandle page : table_.PagesBelow(keyspace, UINT64_MAX)) {
      table_.Remove(page, RemovalReason::kDeleted, now);
    }
    table_.SetShare(keyspace, share);
    changes = table_.TakeChanges();
  }
  Announce(changes);
  return absl::OkStatus();
}

uint32_t HostTier::ShareOfTenant(const std::string& tenant,
                                 std::unique_ptr<EvictionPolicy> policy) {
  if (tenant.empty()) return 0;
  const auto [found, added] = share_of_tenant_.try_emplace(tenant, table_.shares());
  if (added) {
    table_.AddShare(std::move(policy));
    share_used_.push_back(clock_.Now());
  }
  return found->second;
}

absl::StatusOr<UniqueFd> HostTier::OpenSlab(uint32_t slab, const KeyspaceId& keyspace) const {
  MutexLock lock(&mutex_);
  if (inherited_.Holds(slab) && inherited_.share(slab) == table_.ShareOf(keyspace)) {
    return inherited_.OpenReader(slab);
  }
  const bool there = slab < slabs_.size() && (slabs_[slab].phase == SlabState::Phase::kOwned ||
                                              slabs_[slab].phase == SlabState::Phase::kClosing);
  if (!there || slabs_[slab].share != table_.ShareOf(keyspace)) {
    return absl::PermissionDeniedError("the slab is not of the keyspace's tenant");
  }
  return memory_->OpenReader(slab);
}

std::optional<uint32_t> HostTier::TakeSlab(uint32_t share, Demotion& demotion,
                                           std::vector<uint32_t>* gone) {
  EmptyClosing(demotion, gone);
  if (const auto slab = UnusedSlab()) return slab;
  while (GiveUpIdle(share, gone)) {
    if (const auto slab = UnusedSlab()) return slab;
  }
  const bool closing = std::any_of(slabs_.begin(), slabs_.end(), [](const SlabState& slab) {
    return slab.phase == SlabState::Phase::kClosing;
  });
  if (closing) return std::nullopt;  // one at a time
  const auto slab = SlabToClose(share, demotion.now);
  if (!slab) return std::nullopt;
  table_.slots().CloseRegion(*slab);
  slabs_[*slab].phase = SlabState::Phase::kClosing;
  EmptyClosing(demotion, gone);
  return UnusedSlab();
}

std::optional<uint32_t> HostTier::UnusedSlab() {
  for (uint32_t slab = 0; slab < slabs_.size(); ++slab) {
    if (slabs_[slab].phase != SlabState::Phase::kGone) continue;
    const auto has_readers = memory_->HasReaders(slab);
    if (!has_readers.ok() || *has_readers) continue;
    slabs_[slab].phase = SlabState::Phase::kScrubbing;
    return slab;
  }
  return std::nullopt;
}

bool HostTier::GiveUpIdle(uint32_t share, std::vector<uint32_t>* gone) {
  for (uint32_t slab = 0; slab < slabs_.size(); ++slab) {
    SlabState& state = slabs_[slab];
    if (state.phase != SlabState::Phase::kOwned || state.share == share) continue;
    if (state.bytes == 0) continue;  // not there yet
    if (!table_.slots().RemoveRegion(slab)) continue;
    state.phase = SlabState::Phase::kGone;
    gone->push_back(slab);
    return true;
  }
  return false;
}

bool HostTier::TakeIdleSlab(PageHandle page) {
  const TimePoint now = clock_.Now();
  std::vector<uint32_t> gone;
  std::optional<uint32_t> taken;
  uint32_t share = 0;
  uint64_t bytes = 0;
  {
    MutexLock lock(&mutex_);
    if (table_.shares() == 1 || !table_[page].resident) return false;
    share = table_.ShareOf(table_[page].keyspace);
    for (const Fragment& fragment : table_[page].fragments) {
      bytes = std::max<uint64_t>(bytes, fragment.bytes);
    }
    do {
      taken = UnusedSlab();
    } while (!taken && GiveUpIdle(share, &gone));
  }
  for (const uint32_t slab : gone) {
    if (options_.slab_gone) options_.slab_gone(slab);
  }
  if (!taken) return false;
  const auto slot = ScrubAndGive(*taken, share, bytes, now);
  if (slot) Abandon(*slot);
  return slot.has_value();
}

void HostTier::EmptyClosing(Demotion& demotion, std::vector<uint32_t>* gone) {
  for (uint32_t slab = 0; slab < slabs_.size(); ++slab) {
    if (slabs_[slab].phase != SlabState::Phase::kClosing) continue;
    std::vector<PageHandle> owners = table_.slots().OwnersIn(slab);
    std::sort(owners.begin(), owners.end());
    owners.erase(std::unique(owners.begin(), owners.end()), owners.end());
    for (const PageHandle owner : owners) {
      const Page& page = table_[owner];
      if (!page.resident || page.references > 0 || page.pinned_until > demotion.now) continue;
      Evict(owner, demotion);
    }
    if (!table_.slots().RemoveRegion(slab)) continue;
    slabs_[slab].phase = SlabState::Phase::kGone;
    gone->push_back(slab);
  }
}

std::optional<uint32_t> HostTier::SlabToClose(uint32_t share, TimePoint now) {
  std::map<uint32_t, size_t> owned;
  owned[share] = 0;
  for (const SlabState& slab : slabs_) {
    if (slab.phase == SlabState::Phase::kOwned) ++owned[slab.share];
  }
  const size_t part = std::max<size_t>(1, slabs_.size() / owned.size());
  if (owned[share] >= part) return std::nullopt;
  const auto most = std::max_element(
      owned.begin(), owned.end(), [](const auto& a, const auto& b) { return a.second < b.second; });
  uint32_t giver = most->first;
  if (most->second <= part) {
    // More shares than slabs: who was not heard of for longest goes without.
    if (owned[share] > 0) return std::nullopt;
    for (const auto& [other, count] : owned) {
      if (count > 0 && share_used_[other] < share_used_[giver]) giver = other;
    }
  }
  std::optional<uint32_t> emptiest;
  for (uint32_t slab = 0; slab < slabs_.size(); ++slab) {
    const SlabState& state = slabs_[slab];
    if (state.phase != SlabState::Phase::kOwned || state.share != giver) continue;
    if (owned[giver] == 1 && now - state.since < kOnlySlabMin) continue;
    if (!emptiest || table_.slots().used_bytes(slab) < table_.slots().used_bytes(*emptiest)) {
      emptiest = slab;
    }
  }
  return emptiest;
}

std::optional<Slot> HostTier::ScrubAndGive(uint32_t slab, uint32_t share, uint64_t bytes,
                                           TimePoint now) {
  uint64_t written_bytes = 0;
  {
    MutexLock lock(&mutex_);
    if (slabs_[slab].written) written_bytes = slabs_[slab].bytes;
  }
  // Nobody else maps it and nobody is given it: without the lock.
  std::memset(memory_->data(slab), 0, written_bytes);
  MutexLock lock(&mutex_);
  SlabState& state = slabs_[slab];
  if (state.share != share) ++slab_moves_;
  state = {.phase = SlabState::Phase::kOwned,
           .share = share,
           .written = false,
           .bytes = state.bytes,
           .since = now};
  table_.slots().AddRegion(slab, state.bytes, share);
  return Allocate(bytes, share);
}

}  // namespace crumb::storage
