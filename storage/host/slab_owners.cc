// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
// Slabs of tenants: docs/adr/0009-tenants-and-shared-memory.md.
#include "storage/host/slab_owners.h"

#include <algorithm>

namespace crumb::storage {
namespace {

using Phase = SlabOwners::Slab::Phase;

// How long a partition keeps its only slab before a partition without any may take it.
constexpr Duration kOnlySlabMin = std::chrono::seconds(10);
// A slab whose memory has not come back is not tried again for this long.
constexpr Duration kRenewalRetry = std::chrono::seconds(1);
// One slab in so many stays without pages for partitions that have none: a partition that leases a
// page in each of its slabs can keep them all for as long as it likes.
constexpr size_t kReserveFraction = 8;
// Pages of a closing slab that are leased or pinned are not looked at again for this long.
constexpr Duration kClosingRetry = std::chrono::milliseconds(100);

}  // namespace

SlabOwners::SlabOwners(const SlabMemory& memory, const HostOptions& options, SlotAllocator& slots,
                       const InheritedSlabs& inherited, TimePoint now)
    : options_(options), slots_(slots), inherited_(inherited), partitions_({{"", now}}) {
  for (size_t i = 0; i < memory.size(); ++i) {
    slots_.AddRegion(static_cast<uint32_t>(i), memory.bytes(i));
    slabs_.push_back({.bytes = memory.bytes(i), .since = now});
  }
}

std::optional<uint32_t> SlabOwners::PartitionOf(const std::string& tenant) const {
  if (tenant.empty()) return 0;
  const auto found = partition_of_tenant_.find(tenant);
  return found == partition_of_tenant_.end() ? std::nullopt : std::optional(found->second);
}

uint32_t SlabOwners::AddPartition(const std::string& tenant, TimePoint now) {
  const auto partition = static_cast<uint32_t>(partitions_.size());
  partitions_.push_back({tenant, now});
  partition_of_tenant_.emplace(tenant, partition);
  return partition;
}

std::optional<Slot> SlabOwners::Allocate(uint64_t bytes, uint32_t partition) {
  const auto slot = slots_.Allocate(bytes, SlotAllocator::kNoOwner, partition);
  if (slot) slabs_[slot->region].written = true;
  return slot;
}

void SlabOwners::Grow(uint32_t slab, uint64_t bytes) {
  slabs_[slab].bytes = bytes;
  if (slabs_[slab].InTable()) slots_.GrowRegion(slab, bytes);
}

SlabOwners::Parts SlabOwners::CountParts(uint32_t partition) const {
  Parts parts = {.partition = partition, .owned = {{partition, 0}}};
  size_t there = 0;
  for (const Slab& slab : slabs_) {
    if (slab.bytes == 0) continue;  // its memory is not allocated yet
    ++there;
    if (slab.phase == Phase::kOwned) ++parts.owned[slab.partition];
    if (slab.phase != Phase::kGone || slab.partition != partition) continue;
    if (slab.written && !slab.dropped) ++parts.kept;
  }
  // Slabs that crumbd took over and gave up count, too, for as long as processes keep them.
  for (const InheritedSlabs::Leaving& slab : inherited_.leaving()) {
    if (slab.partition == partition) ++parts.kept;
  }
  parts.part = std::max<size_t>(1, there / parts.owned.size());
  return parts;
}

std::optional<uint32_t> SlabOwners::TakeUnused(std::span<const uint32_t> tried, TimePoint now) {
  for (size_t i = 0; i < slabs_.size(); ++i) {
    const auto slab = static_cast<uint32_t>((next_gone_ + i) % slabs_.size());
    if (slabs_[slab].phase != Phase::kGone || slabs_[slab].retry > now) continue;
    if (slabs_[slab].pinned && pinned_retry_ > now) continue;
    if (std::find(tried.begin(), tried.end(), slab) != tried.end()) continue;
    slabs_[slab].phase = Phase::kRenewing;
    next_gone_ = slab + 1;
    return slab;
  }
  return std::nullopt;
}

bool SlabOwners::MayTakeIdle(const Parts& parts) const {
  if (parts.own() + parts.kept == 0) return true;
  size_t idle = 0;
  for (uint32_t slab = 0; slab < slabs_.size(); ++slab) {
    const Slab& state = slabs_[slab];
    const bool empty = state.phase == Phase::kOwned && state.partition != parts.partition &&
                       state.bytes > 0 && slots_.used_bytes(slab) == 0;
    if (state.phase == Phase::kGone || empty) ++idle;
  }
  return idle > slabs_.size() / kReserveFraction;
}

bool SlabOwners::Settling(TimePoint now) const {
  return std::any_of(slabs_.begin(), slabs_.end(), [&](const Slab& slab) {
    return !slab.InTable() && slab.written && now < slab.since + options_.let_go_timeout;
  });
}

std::optional<uint32_t> SlabOwners::GiveUpIdle(uint32_t partition, TimePoint now) {
  // Slabs that never held a page cost nothing to move; of the others, one at a time.
  for (const bool written : {false, true}) {
    if (written && Settling(now)) return std::nullopt;
    for (uint32_t slab = 0; slab < slabs_.size(); ++slab) {
      const Slab& state = slabs_[slab];
      if (state.phase != Phase::kOwned || state.partition == partition) continue;
      if (state.written != written || state.bytes == 0) continue;  // 0: not there yet
      if (GiveUp(slab, now)) return slab;
    }
  }
  return std::nullopt;
}

bool SlabOwners::GiveUp(uint32_t slab, TimePoint now) {
  Slab& state = slabs_[slab];
  state.looked_at = 0;
  if (!slots_.RemoveRegion(slab)) {
    state.retry = now + kClosingRetry;
    return false;
  }
  state.phase = Phase::kGone;
  state.since = now;
  state.retry = TimePoint::min();
  return true;
}

bool SlabOwners::CloseOneFor(const Parts& parts, TimePoint now) {
  // A slab whose pages stay leased does not hold up the next for long.
  const bool closing = std::any_of(slabs_.begin(), slabs_.end(), [&](const Slab& slab) {
    return slab.phase == Phase::kClosing && now < slab.since + options_.let_go_timeout;
  });
  if (closing || Settling(now)) return false;
  const auto slab = SlabToClose(parts, now);
  if (!slab) return false;
  slots_.CloseRegion(*slab);
  slabs_[*slab].phase = Phase::kClosing;
  slabs_[*slab].since = now;
  slabs_[*slab].retry = TimePoint::min();
  slabs_[*slab].looked_at = 0;
  return true;
}

bool SlabOwners::NextClosing(uint32_t slab, std::vector<uint32_t>& owners) {
  return slots_.NextOwners(slab, slabs_[slab].looked_at, owners);
}

std::vector<uint32_t> SlabOwners::Closing(TimePoint now) const {
  std::vector<uint32_t> closing;
  for (uint32_t slab = 0; slab < slabs_.size(); ++slab) {
    if (slabs_[slab].phase == Phase::kClosing && slabs_[slab].retry <= now) closing.push_back(slab);
  }
  return closing;
}

std::optional<uint32_t> SlabOwners::SlabToClose(const Parts& parts, TimePoint now) const {
  const std::map<uint32_t, size_t>& owned = parts.owned;
  if (parts.own() >= parts.part) return std::nullopt;
  const auto most = std::max_element(
      owned.begin(), owned.end(), [](const auto& a, const auto& b) { return a.second < b.second; });
  uint32_t giver = most->first;
  if (most->second <= parts.part) {
    // More partitions than slabs: the one that was not used for longest goes without.
    if (parts.own() > 0) return std::nullopt;
    for (const auto& [other, count] : owned) {
      if (count > 0 && partitions_[other].used < partitions_[giver].used) giver = other;
    }
  }
  std::optional<uint32_t> emptiest;
  for (uint32_t slab = 0; slab < slabs_.size(); ++slab) {
    const Slab& state = slabs_[slab];
    if (state.phase != Phase::kOwned || state.partition != giver || state.bytes == 0) continue;
    if (owned.at(giver) == 1 && now - state.since < kOnlySlabMin) continue;
    if (!emptiest || slots_.used_bytes(slab) < slots_.used_bytes(*emptiest)) emptiest = slab;
  }
  return emptiest;
}

bool SlabOwners::MayRevoke(uint32_t slab, TimePoint now) const {
  const auto found = revoked_.find(TenantOf(slabs_[slab].partition));
  const uint64_t of_tenant = found == revoked_.end() ? 0 : found->second;
  return now >= slabs_[slab].since + options_.let_go_timeout &&
         revoked_sum_ < static_cast<uint64_t>(options_.revoked_slabs_max) &&
         of_tenant < static_cast<uint64_t>(options_.revoked_slabs_per_tenant);
}

void SlabOwners::EndDrop(uint32_t slab, SlabMemory::Drop drop, bool revoked, uint64_t free_before,
                         TimePoint now) {
  Slab& state = slabs_[slab];
  if (revoked) {
    ++revoked_[TenantOf(state.partition)];
    ++revoked_sum_;
  }
  state.dropped = revoked || drop == SlabMemory::Drop::kDropped;
  state.free_before = free_before;
  state.pinned = drop == SlabMemory::Drop::kPinned;
  if (!state.pinned) return;
  pinned_retry_ = now + kPinnedRetry;
  ++pinned_checks_;
}

void SlabOwners::EndRenewal(uint32_t slab, bool fresh, TimePoint now) {
  Slab& state = slabs_[slab];
  if (fresh) {
    state.dropped = false;
    state.written = false;
    return;
  }
  if (state.dropped) {
    ++renewals_failed_;
    state.retry = now + kRenewalRetry;
  }
  state.phase = Phase::kGone;
}

void SlabOwners::Give(uint32_t slab, uint32_t partition, TimePoint now) {
  Slab& state = slabs_[slab];
  if (state.partition != partition) ++moves_;
  state.phase = Phase::kOwned;
  state.partition = partition;
  ++state.given;
  state.since = now;
  slots_.AddRegion(slab, state.bytes, partition);
}

void SlabOwners::SetRevoked(const std::map<std::string, uint64_t>& revoked) {
  revoked_ = revoked;
  revoked_sum_ = 0;
  for (const auto& [tenant, slabs] : revoked_) revoked_sum_ += slabs;
}

void SlabOwners::AddStats(StoreStats& stats) const {
  stats.slab_moves = moves_;
  stats.slabs_kept = inherited_.leaving().size();
  stats.slabs_revoked = revoked_sum_;
  stats.slab_renewals_failed = renewals_failed_;
  stats.slab_pinned_checks = pinned_checks_;
  for (const Slab& slab : slabs_) {
    if (!slab.InTable()) stats.host.capacity_bytes += slab.bytes;
    ++(slab.phase == Phase::kOwned     ? stats.slabs_owned
       : slab.phase == Phase::kClosing ? stats.slabs_closing
                                       : stats.slabs_gone);
  }
}

}  // namespace crumb::storage
