// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "storage/host_tier.h"

#include <algorithm>
#include <bit>
#include <string>
#include <utility>

#include "common/status_macros.h"

namespace crumb::storage {
namespace {

// Slots begin on the granule, so that they can be written to disk without a copy, and on pages
// where that costs little: disks fill memory faster that is not cut across its pages.
constexpr SlotAllocator::Rounding kRounding = {.granule_bytes = 512, .page_bytes = 4096};
// A search for room lets the lock go after so many evictions, or pages looked at; 64 and 1,024 take
// some 50 us each.
constexpr size_t kEvictionsPerHold = 64;
constexpr size_t kVictimStepsPerHold = 1024;
// Pages that one Reserve looks at for each that it evicts, before it gives up: some 3 ms. Only
// where so many in a row are leased or pinned does it end without having seen all.
constexpr size_t kVictimStepsMax = 65'536;

// Pages that one step of a walk looks at under the lock.
constexpr PageHandle kWalkPages = 4096;

// Whether the fragment is not in the tier below, nor on its way there.
bool IsAbsent(const Fragment& fragment) {
  return fragment.below == Below::kAbsent || fragment.below == Below::kUnowed;
}

}  // namespace

absl::StatusOr<std::unique_ptr<HostTier>> HostTier::Open(const Options& options, const Clock& clock,
                                                         FragmentTierEvents events) {
  const uint64_t pages = options.host.bytes_max.value / kTypicalPageBytes + 1;
  CRUMB_ASSIGN_OR_RETURN(auto policy, MakePolicy(options.host.policy, pages));
  CRUMB_ASSIGN_OR_RETURN(auto memory,
                         SlabMemory::Open(options.host, options.first_bytes, options.sharing));
  return std::unique_ptr<HostTier>(
      new HostTier(options, std::move(memory), std::move(policy), clock, std::move(events)));
}

HostTier::HostTier(const Options& options, std::unique_ptr<SlabMemory> memory,
                   std::unique_ptr<EvictionPolicy> policy, const Clock& clock,
                   FragmentTierEvents events)
    : options_(options),
      memory_(std::move(memory)),
      clock_(clock),
      events_(std::move(events)),
      losses_(options.mark_base),
      table_(std::move(policy), kRounding, &inherited_, &losses_) {
  table_.SetPageFragmentsMax(options.page_fragments_max);
  for (size_t i = 0; i < memory_->size(); ++i) {
    table_.slots().AddRegion(static_cast<uint32_t>(i), memory_->bytes(i));
    slabs_.push_back({.bytes = memory_->bytes(i), .since = clock_.Now()});
  }
  share_used_.push_back(clock_.Now());
  numbers_ = std::bit_ceil(static_cast<uint32_t>(memory_->size()));
}

absl::StatusOr<Slot> HostTier::Reserve(const KeyspaceId& keyspace, uint64_t bytes,
                                       uint64_t departing_bytes_max,
                                       std::vector<Departure>* departures) {
  if (bytes > memory_->slab_bytes()) {
    return absl::InvalidArgumentError("a fragment of " + std::to_string(bytes) +
                                      " bytes is larger than a slab: raise host.slab_bytes");
  }
  Demotion demotion = {clock_.Now(), departing_bytes_max, departures};
  Search search = {.bytes = bytes};
  bool tenants = false;
  for (bool first = true; first || search.goes_on(); first = false) {
    std::vector<PageTable::Change> changes;
    {
      MutexLock lock(&mutex_);
      search.share = table_.ShareOf(keyspace);
      share_used_[search.share] = demotion.now;
      search.slot = Allocate(bytes, search.share);
      tenants = table_.shares() > 1;
      if (!search.slot && !tenants) EvictFor(search, demotion);
      changes = table_.TakeChanges();
    }
    Announce(changes);
    if (tenants) break;
  }
  if (!search.slot && tenants) {
    search.slot = AllocateFromOthers(bytes, search.share, demotion);
  }
  if (!search.slot) {
    return absl::ResourceExhaustedError("every slot of host memory is leased or being written");
  }
  return *search.slot;
}

std::optional<Slot> HostTier::Allocate(uint64_t bytes, uint32_t share) {
  const auto slot = table_.slots().Allocate(bytes, SlotAllocator::kNoOwner, share);
  if (slot) slabs_[slot->region].written = true;
  return slot;
}

void HostTier::EvictFor(Search& search, Demotion& demotion) {
  for (size_t evicted = 0; evicted < kEvictionsPerHold; ++evicted) {
    if (!EvictOne(search, demotion)) return;
    search.slot = Allocate(search.bytes, search.share);
    if (search.slot) return;
    EmptyChunkFor(search.bytes, search.share, demotion.now);
    search.slot = Allocate(search.bytes, search.share);
    if (search.slot) return;
  }
}

bool HostTier::EvictOne(Search& search, Demotion& demotion) {
  // Nothing of its own: no search would find a victim.
  if (inherited_.held_bytes() > 0 && table_.slots().used_bytes() == 0) {
    search.ended = true;
    return false;
  }
  // The slots of an adopted slab are no use to anybody.
  const auto may_go = [this](const Page& page) {
    mutex_.AssertHeld();
    return inherited_.held_bytes() == 0 || table_.HasOwnSlot(page);
  };
  for (size_t left = kVictimStepsPerHold; left > 0;) {
    size_t steps = left;
    const auto victim = table_.Victim(demotion.now, may_go, search.share, steps);
    search.steps += left - steps;
    left = steps;
    if (!victim) {
      search.ended = steps > 0 || search.steps >= kVictimStepsMax;
      return false;
    }
    if (Evict(*victim, demotion)) {
      search.steps = 0;
      return true;
    }
  }
  return false;
}

bool HostTier::Evict(PageHandle page, Demotion& demotion) {
  const bool worth_keeping = !options_.demote_only_hit || table_[page].was_hit;
  const uint64_t absent_bytes = BytesAbsentBelow(table_[page]);
  if (absent_bytes == 0 || !worth_keeping || absent_bytes > demotion.bytes_max) {
    table_.Remove(page, RemovalReason::kCapacity, demotion.now);
    return true;
  }
  demotion.bytes_max -= absent_bytes;
  Depart(page, demotion.departures);
  return false;
}

void HostTier::EmptyChunkFor(uint64_t bytes, uint32_t share, TimePoint now) {
  std::vector<PageHandle> owners = table_.slots().OwnersOfNearlyEmptyChunk(bytes, share);
  std::sort(owners.begin(), owners.end());
  owners.erase(std::unique(owners.begin(), owners.end()), owners.end());
  for (const PageHandle owner : owners) {
    const Page& page = table_[owner];
    if (!page.resident || page.references > 0 || page.pinned_until > now ||
        BytesAbsentBelow(page) > 0) {
      return;
    }
  }
  for (const PageHandle owner : owners) table_.Remove(owner, RemovalReason::kCapacity, now);
}

uint64_t HostTier::BytesAbsentBelow(const Page& page) const {
  uint64_t bytes = 0;
  for (const Fragment& fragment : page.fragments) {
    if (IsAbsent(fragment)) bytes += fragment.bytes;
  }
  return bytes;
}

void HostTier::Depart(PageHandle handle, std::vector<Departure>* departures) {
  Page& page = table_[handle];
  for (Fragment& fragment : page.fragments) {
    if (!IsAbsent(fragment)) continue;
    const Below otherwise = std::exchange(fragment.below, Below::kQueued);
    table_.Ref(handle);
    departures->push_back({handle, table_.MetaOf(page, fragment), otherwise});
  }
}

std::span<std::byte> HostTier::Memory(const Slot& slot) const {
  return {Data(slot.region) + slot.offset, slot.bytes};
}

void HostTier::Abandon(const Slot& slot) {
  MutexLock lock(&mutex_);
  table_.slots().Free(slot);
}

absl::StatusOr<PageHandle> HostTier::Publish(const FragmentMeta& meta, const Slot& slot,
                                             Below below) {
  const TimePoint now = clock_.Now();
  absl::StatusOr<PageHandle> page;
  std::vector<PageTable::Change> changes;
  {
    MutexLock lock(&mutex_);
    table_.BeginAccess(table_.ShareOf(meta.keyspace));
    page = slabs_[slot.region].share == table_.ShareOf(meta.keyspace)
               ? table_.Insert(meta, slot, below, now)
               : absl::ResourceExhaustedError("the keyspace became another tenant's meanwhile");
    if (page.ok()) {
      table_.Ref(*page);
      table_.CountPut(meta);
    } else {
      table_.slots().Free(slot);
    }
    changes = table_.TakeChanges();
  }
  Announce(changes);
  return page;
}

std::vector<Departure> HostTier::RefAbsentBelow(size_t pages_max, bool only_hit, PageWalk* walk) {
  std::vector<Departure> departures;
  size_t pages = 0;
  MutexLock lock(&mutex_);
  const PageHandle end = std::min(table_.handles_end(), walk->next + kWalkPages);
  for (; walk->next < end && pages < pages_max; ++walk->next) {
    const Page& page = table_[walk->next];
    if (!page.resident || page.added > walk->begun || (only_hit && !page.was_hit)) continue;
    const size_t before = departures.size();
    Depart(walk->next, &departures);
    if (departures.size() > before) ++pages;
  }
  walk->over = walk->next == table_.handles_end();
  return departures;
}

void HostTier::CountNotBelow(bool only_hit, PageWalk* walk, NotBelowCounts* counts) const {
  KeyspaceId counted_keyspace;
  NotBelow counted;  // of that keyspace
  MutexLock lock(&mutex_);
  const auto add_counted = [&] {
    mutex_.AssertHeld();
    counts->all += counted;
    const std::string* const owner = losses_.OwnerOf(counted_keyspace);
    if (owner != nullptr) counts->tenants[*owner] += counted;
    counted = NotBelow();
  };
  const PageHandle end = std::min(table_.handles_end(), walk->next + kWalkPages);
  for (; walk->next < end; ++walk->next) {
    const Page& page = table_[walk->next];
    if (!page.resident || page.added > walk->begun) continue;
    bool absent = false;
    bool queued = false;
    bool refused = false;
    for (const Fragment& fragment : page.fragments) {
      absent |= IsAbsent(fragment);
      queued |= fragment.below == Below::kQueued;
      refused |= fragment.below == Below::kRefused;
    }
    if (!absent && !queued && !refused) continue;
    const bool unread = only_hit && !page.was_hit;
    if (page.keyspace != counted_keyspace) {
      add_counted();
      counted_keyspace = page.keyspace;
    }
    ++(refused  ? counted.refused
       : unread ? counted.unread
       : absent ? counted.absent
                : counted.queued);
  }
  add_counted();
  walk->over = walk->next == table_.handles_end();
}

std::vector<Departure> HostTier::RefAbsentBelow(const KeyspaceId& keyspace,
                                                std::span<const PageKey> keys) {
  std::vector<Departure> departures;
  InPieces(keys, kRemovalsPerHold, [&](std::span<const PageKey> piece) {
    MutexLock lock(&mutex_);
    for (const PageKey& key : piece) {
      const PageHandle handle = table_.Find(keyspace, key);
      if (handle != kNoPage) Depart(handle, &departures);
    }
  });
  for (Departure& departure : departures) departure.otherwise = Below::kAbsent;
  return departures;
}

std::span<const std::byte> HostTier::View(const Departure& departure) const {
  MutexLock lock(&mutex_);
  const Page& page = table_[departure.page];
  if (!page.resident) return {};
  for (const Fragment& fragment : page.fragments) {
    if (fragment.range == departure.meta.range) return Memory(fragment.slot);
  }
  return {};
}

bool HostTier::Return(const Departure& departure, Below below) {
  MutexLock lock(&mutex_);
  Page& page = table_[departure.page];
  for (Fragment& fragment : page.fragments) {
    if (fragment.range == departure.meta.range) fragment.below = below;
  }
  const bool all_below =
      page.resident && below == Below::kStored &&
      std::all_of(page.fragments.begin(), page.fragments.end(),
                  [](const Fragment& fragment) { return fragment.below == Below::kStored; });
  table_.Unref(departure.page);
  return all_below;
}

void HostTier::ForgetBelow(const KeyspaceId& keyspace, const PageKey& key) {
  MutexLock lock(&mutex_);
  const PageHandle handle = table_.Find(keyspace, key);
  if (handle == kNoPage) return;
  for (Fragment& fragment : table_[handle].fragments) {
    if (fragment.below == Below::kStored) fragment.below = Below::kUnowed;
  }
}

void HostTier::Announce(const std::vector<PageTable::Change>& changes) const {
  for (const PageTable::Change& change : changes) {
    (change.added ? events_.added : events_.removed)(change.keyspace, change.key);
  }
}

TierStats HostTier::Stats() const {
  MutexLock lock(&mutex_);
  TierStats stats = table_.Stats();
  for (const SlabState& slab : slabs_) {
    const bool in_table =
        slab.phase == SlabState::Phase::kOwned || slab.phase == SlabState::Phase::kClosing;
    if (!in_table) stats.capacity_bytes += slab.bytes;
  }
  return stats;
}

void HostTier::AddLeaseStats(StoreStats& stats) const {
  const TimePoint now = clock_.Now();
  MutexLock lock(&mutex_);
  stats.leases = leases_.size();
  stats.leased_slots = leased_fragments_;
  stats.slab_moves = slab_moves_;
  stats.slabs_kept = inherited_.leaving().size();
  stats.slabs_revoked = revoked_;
  stats.slab_renewals_failed = renewals_failed_;
  stats.slab_pinned_checks = pinned_checks_;
  for (const SlabState& slab : slabs_) {
    ++(slab.phase == SlabState::Phase::kOwned     ? stats.slabs_owned
       : slab.phase == SlabState::Phase::kClosing ? stats.slabs_closing
                                                  : stats.slabs_gone);
  }
  if (leases_.empty()) return;
  // Leases are numbered in the order in which they were given.
  const Duration age = now - leases_.begin()->second.since;
  stats.oldest_lease_seconds = std::max(0.0, std::chrono::duration<double>(age).count());
}

}  // namespace crumb::storage
