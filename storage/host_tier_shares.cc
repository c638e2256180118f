// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
// Slabs of tenants: docs/adr/0009-tenants-and-shared-memory.md.
#include <algorithm>
#include <map>

#include "common/logging.h"
#include "common/status_macros.h"
#include "storage/host_tier.h"

namespace crumb::storage {
namespace {

// How long a share keeps its only slab before a share without any may take it.
constexpr Duration kOnlySlabMin = std::chrono::seconds(10);
// Slabs that one reservation tries to make fresh: bounds its system calls.
constexpr size_t kSlabTriesMax = 8;
// Pages of a closing slab that leave before other callers get the lock.
constexpr size_t kEvictionsPerLock = 256;
// After pages were found pinned no slab of which that is known is looked at again for this long.
// The kernel takes up to 200 ms to find out, on the thread of a writer, and a tenant can pin a page
// of each of its slabs.
constexpr Duration kPinnedRetry = std::chrono::seconds(4);
// A slab whose memory has not come back is not tried again for this long.
constexpr Duration kRenewalRetry = std::chrono::seconds(1);
// Free memory that must be left when a slab takes its memory again, unless there was less before.
constexpr uint64_t kFreeMin = uint64_t{64} << 20;
// Measures of free memory lag behind and count others' allocations: a sixteenth of a slab may be
// missing in them.
constexpr uint64_t kFreeNoiseShare = 16;
// One slab in so many stays without pages for shares that have none: a share that leases a page in
// each of its slabs can keep them all for as long as it likes.
constexpr size_t kReserveShare = 8;
// Pages of a closing slab that are leased or pinned are not looked at again for this long.
constexpr Duration kClosingRetry = std::chrono::milliseconds(100);

}  // namespace

void HostTier::SetOwner(const KeyspaceId& keyspace, const std::string& tenant) {
  MutexLock lock(&mutex_);
  losses_.SetOwner(keyspace, tenant);
}

void HostTier::ForgetOwner(const KeyspaceId& keyspace) {
  MutexLock lock(&mutex_);
  losses_.ForgetOwner(keyspace);
}

absl::Status HostTier::SetTenant(const KeyspaceId& keyspace, const std::string& tenant) {
  if (memory_->sharing() != SlabMemory::Sharing::kByTenant) {
    return absl::FailedPreconditionError("the store was opened without slabs of tenants");
  }
  CRUMB_ASSIGN_OR_RETURN(
      auto policy, MakePolicy(options_.host.policy, capacity_bytes() / kTypicalPageBytes + 1));
  const TimePoint now = clock_.Now();
  for (bool moved = false; !moved;) {
    std::vector<PageTable::Change> changes;
    {
      MutexLock lock(&mutex_);
      const uint32_t share = ShareOfTenant(tenant, std::move(policy));
      if (table_.ShareOf(keyspace) == share) return absl::OkStatus();
      const auto pages = table_.PagesBelow(keyspace, UINT64_MAX, kRemovalsPerHold);
      for (const PageHandle page : pages) table_.Remove(page, RemovalReason::kCapacity, now);
      moved = pages.size() < kRemovalsPerHold;
      if (moved) table_.SetShare(keyspace, share);
      changes = table_.TakeChanges();
    }
    Announce(changes);
  }
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
  const uint32_t region = RegionOf(slab);
  if (inherited_.Holds(slab) && inherited_.share(slab) == table_.ShareOf(keyspace)) {
    return inherited_.OpenReader(slab);
  }
  const bool there = region < slabs_.size() && slab == NumberOf(region) &&
                     (slabs_[region].phase == SlabState::Phase::kOwned ||
                      slabs_[region].phase == SlabState::Phase::kClosing);
  if (!there || !slabs_[region].written || slabs_[region].share != table_.ShareOf(keyspace)) {
    return absl::PermissionDeniedError("the slab is not of the keyspace's tenant");
  }
  return memory_->OpenReader(region);
}

std::optional<Slot> HostTier::AllocateFromOthers(uint64_t bytes, uint32_t share,
                                                 Demotion& demotion) {
  Search search = {.bytes = bytes, .share = share};
  std::vector<uint32_t> tried;
  while (true) {
    std::optional<uint32_t> taken;
    std::vector<uint32_t> gone;
    std::vector<PageTable::Change> changes;
    bool more = false;
    {
      MutexLock lock(&mutex_);
      search.slot = Allocate(bytes, share);
      if (!search.slot && tried.size() < kSlabTriesMax) {
        taken = TakeSlab(share, demotion, tried, &gone, &more);
      }
      if (!search.slot && !taken && !more) EvictFor(search, demotion);
      changes = table_.TakeChanges();
    }
    Announce(changes);
    TellGone(gone);
    if (more || (!taken && search.goes_on())) continue;
    if (!taken) return search.slot;
    if (MakeFresh(*taken)) return Give(*taken, share, bytes);
    tried.push_back(*taken);
  }
}

void HostTier::TellGone(std::span<const uint32_t> gone) const {
  if (!options_.slab_gone) return;
  for (const uint32_t number : gone) options_.slab_gone(number);
}

std::optional<uint32_t> HostTier::TakeSlab(uint32_t share, Demotion& demotion,
                                           std::span<const uint32_t> tried,
                                           std::vector<uint32_t>* gone, bool* more) {
  *more = EmptyClosing(demotion, gone);
  if (*more) return std::nullopt;
  // A slab that a tenant's processes keep counts as the tenant's: giving slabs up without letting
  // them go brings it no others.
  Parts parts = CountParts(share);
  if (parts.kept[share] > 0 && parts.owned[share] + parts.kept[share] >= parts.part) {
    return std::nullopt;
  }
  const bool has_slabs = parts.owned[share] + parts.kept[share] > 0;
  if (!has_slabs || IdleSlabs(share) > slabs_.size() / kReserveShare) {
    if (const auto slab = UnusedSlab(tried, demotion.now)) return slab;
    if (GiveUpIdle(share, demotion.now, gone)) return UnusedSlab(tried, demotion.now);
  }
  // One at a time, but one whose pages stay leased does not hold up the next for long.
  const bool closing = std::any_of(slabs_.begin(), slabs_.end(), [&](const SlabState& slab) {
    return slab.phase == SlabState::Phase::kClosing &&
           demotion.now < slab.since + options_.host.let_go_timeout;
  });
  if (closing || Settling(demotion.now)) return std::nullopt;
  const auto slab = SlabToClose(share, demotion.now);
  if (!slab) return std::nullopt;
  table_.slots().CloseRegion(*slab);
  slabs_[*slab].phase = SlabState::Phase::kClosing;
  slabs_[*slab].since = demotion.now;
  slabs_[*slab].retry = TimePoint::min();
  *more = EmptyClosing(demotion, gone);
  if (*more) return std::nullopt;
  return UnusedSlab(tried, demotion.now);
}

std::optional<uint32_t> HostTier::UnusedSlab(std::span<const uint32_t> tried, TimePoint now) {
  for (size_t i = 0; i < slabs_.size(); ++i) {
    const auto slab = static_cast<uint32_t>((next_gone_ + i) % slabs_.size());
    if (slabs_[slab].phase != SlabState::Phase::kGone || slabs_[slab].retry > now) continue;
    if (slabs_[slab].pinned && pinned_retry_ > now) continue;
    if (std::find(tried.begin(), tried.end(), slab) != tried.end()) continue;
    slabs_[slab].phase = SlabState::Phase::kRenewing;
    next_gone_ = slab + 1;
    return slab;
  }
  return std::nullopt;
}

size_t HostTier::IdleSlabs(uint32_t share) const {
  size_t idle = 0;
  for (uint32_t slab = 0; slab < slabs_.size(); ++slab) {
    const SlabState& state = slabs_[slab];
    const bool empty = state.phase == SlabState::Phase::kOwned && state.share != share &&
                       state.bytes > 0 && table_.slots().used_bytes(slab) == 0;
    if (state.phase == SlabState::Phase::kGone || empty) ++idle;
  }
  return idle;
}

bool HostTier::Settling(TimePoint now) const {
  return std::any_of(slabs_.begin(), slabs_.end(), [&](const SlabState& slab) {
    const bool given_up =
        slab.phase == SlabState::Phase::kGone || slab.phase == SlabState::Phase::kRenewing;
    return given_up && slab.written && now < slab.since + options_.host.let_go_timeout;
  });
}

void HostTier::GiveUp(uint32_t slab, TimePoint now, std::vector<uint32_t>* gone) {
  slabs_[slab].phase = SlabState::Phase::kGone;
  slabs_[slab].since = now;
  slabs_[slab].retry = TimePoint::min();
  gone->push_back(NumberOf(slab));
}

bool HostTier::GiveUpIdle(uint32_t share, TimePoint now, std::vector<uint32_t>* gone) {
  // Slabs that never held a page cost nothing to move; of the others, one at a time.
  for (const bool written : {false, true}) {
    if (written && Settling(now)) return false;
    for (uint32_t slab = 0; slab < slabs_.size(); ++slab) {
      const SlabState& state = slabs_[slab];
      if (state.phase != SlabState::Phase::kOwned || state.share == share) continue;
      if (state.written != written || state.bytes == 0) continue;  // 0: not there yet
      if (!table_.slots().RemoveRegion(slab)) continue;
      GiveUp(slab, now, gone);
      return true;
    }
  }
  return false;
}

bool HostTier::TakeIdleSlab(PageHandle page) {
  const TimePoint now = clock_.Now();
  std::vector<uint32_t> tried;
  while (tried.size() < kSlabTriesMax) {
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
      taken = UnusedSlab(tried, now);
      if (!taken && GiveUpIdle(share, now, &gone)) taken = UnusedSlab(tried, now);
    }
    TellGone(gone);
    if (!taken) return false;
    if (MakeFresh(*taken)) {
      const auto slot = Give(*taken, share, bytes);
      if (slot) Abandon(*slot);
      return slot.has_value();
    }
    tried.push_back(*taken);
  }
  return false;
}

bool HostTier::EmptyClosing(Demotion& demotion, std::vector<uint32_t>* gone) {
  size_t evictions = 0;
  for (uint32_t slab = 0; slab < slabs_.size(); ++slab) {
    if (slabs_[slab].phase != SlabState::Phase::kClosing) continue;
    if (slabs_[slab].retry > demotion.now) continue;
    std::vector<PageHandle> owners = table_.slots().OwnersIn(slab);
    std::sort(owners.begin(), owners.end());
    owners.erase(std::unique(owners.begin(), owners.end()), owners.end());
    for (const PageHandle owner : owners) {
      const Page& page = table_[owner];
      if (!page.resident || page.references > 0 || page.pinned_until > demotion.now) continue;
      if (++evictions > kEvictionsPerLock) return true;
      Evict(owner, demotion);
    }
    if (table_.slots().RemoveRegion(slab)) {
      GiveUp(slab, demotion.now, gone);
    } else {
      slabs_[slab].retry = demotion.now + kClosingRetry;
    }
  }
  return false;
}

HostTier::Parts HostTier::CountParts(uint32_t share) const {
  Parts parts;
  parts.owned[share] = 0;
  size_t there = 0;
  for (const SlabState& slab : slabs_) {
    if (slab.bytes == 0) continue;  // not there yet
    ++there;
    if (slab.phase == SlabState::Phase::kOwned) ++parts.owned[slab.share];
    if (slab.phase == SlabState::Phase::kGone && slab.written && !slab.dropped) {
      ++parts.kept[slab.share];
    }
  }
  // Slabs that crumbd took over and gave up count, too, for as long as processes keep them.
  for (const InheritedSlabs::Leaving& slab : inherited_.leaving()) {
    if (slab.share != InheritedSlabs::kMixed) ++parts.kept[slab.share];
  }
  parts.part = std::max<size_t>(1, there / parts.owned.size());
  return parts;
}

std::optional<uint32_t> HostTier::SlabToClose(uint32_t share, TimePoint now) {
  Parts parts = CountParts(share);
  std::map<uint32_t, size_t>& owned = parts.owned;
  const size_t part = parts.part;
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
    if (state.bytes == 0) continue;
    if (owned[giver] == 1 && now - state.since < kOnlySlabMin) continue;
    if (!emptiest || table_.slots().used_bytes(slab) < table_.slots().used_bytes(*emptiest)) {
      emptiest = slab;
    }
  }
  return emptiest;
}

bool HostTier::MayRevoke(uint32_t slab) {
  const TimePoint now = clock_.Now();
  MutexLock lock(&mutex_);
  const SlabState& state = slabs_[slab];
  const auto found = revoked_of_.find(TenantOfShare(state.share));
  const uint64_t of_tenant = found == revoked_of_.end() ? 0 : found->second;
  if (now < state.since + options_.host.let_go_timeout ||
      revoked_ >= static_cast<uint64_t>(options_.host.revoked_slabs_max) ||
      of_tenant >= static_cast<uint64_t>(options_.host.revoked_slabs_per_tenant)) {
    return false;
  }
  return true;
}

std::string HostTier::TenantOfShare(uint32_t share) const {
  for (const auto& [tenant, its] : share_of_tenant_) {
    if (its == share) return tenant;
  }
  return "";
}

void HostTier::CountRevoked(uint32_t slab) {
  ++revoked_of_[TenantOfShare(slabs_[slab].share)];
  ++revoked_;
}

bool HostTier::DropFile(uint32_t slab) {
  const uint64_t free_before = options_.free_memory ? options_.free_memory() : UINT64_MAX;
  const SlabMemory::Drop drop = memory_->TryDrop(slab);
  bool dropped = drop == SlabMemory::Drop::kDropped;
  // Memory that is not shown to be free may be in use outside for as long as it is pinned there,
  // which nothing can find out later: so it is counted, and limited.
  if (!dropped && MayRevoke(slab)) {
    const absl::Status revoked = memory_->Revoke(slab);
    dropped = revoked.ok();
    LogWarning(
        "host tier: slab {} is taken from processes that did not let it go within "
        "store.host.let_go_timeout: {}",
        slab, revoked.ToString());
  }
  MutexLock lock(&mutex_);
  if (dropped && drop != SlabMemory::Drop::kDropped) CountRevoked(slab);
  slabs_[slab].dropped = dropped;
  slabs_[slab].free_before = free_before;
  slabs_[slab].pinned = drop == SlabMemory::Drop::kPinned;
  if (slabs_[slab].pinned) {
    pinned_retry_ = clock_.Now() + kPinnedRetry;
    ++pinned_checks_;
  }
  return dropped;
}

bool HostTier::MakeFresh(uint32_t slab) {
  bool dropped = false;
  {
    MutexLock lock(&mutex_);
    if (!slabs_[slab].written) return true;  // no process was ever given its file
    dropped = slabs_[slab].dropped;
  }
  bool fresh = false;
  if (dropped || DropFile(slab)) {
    uint64_t free_before = 0;
    {
      MutexLock lock(&mutex_);
      free_before = slabs_[slab].free_before;
    }
    const absl::Status renewed = memory_->Renew(slab, [&](uint64_t bytes) {
      if (!options_.free_memory) return true;
      return options_.free_memory() + bytes / kFreeNoiseShare >=
             bytes + std::min(free_before, kFreeMin);
    });
    fresh = renewed.ok();
    if (!fresh) LogWarning("host tier: slab {} stays out of use: {}", slab, renewed.ToString());
  }
  MutexLock lock(&mutex_);
  SlabState& state = slabs_[slab];
  if (fresh) {
    state.dropped = false;
    state.written = false;
    ++state.files;
    return true;
  }
  if (state.dropped) {
    ++renewals_failed_;
    state.retry = clock_.Now() + kRenewalRetry;
  }
  state.phase = SlabState::Phase::kGone;
  return false;
}

std::optional<Slot> HostTier::Give(uint32_t slab, uint32_t share, uint64_t bytes) {
  const TimePoint now = clock_.Now();
  MutexLock lock(&mutex_);
  SlabState& state = slabs_[slab];
  if (state.share != share) ++slab_moves_;
  state.phase = SlabState::Phase::kOwned;
  state.share = share;
  state.since = now;
  table_.slots().AddRegion(slab, state.bytes, share);
  return Allocate(bytes, share);
}

}  // namespace crumb::storage
