// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "storage/host_tier.h"

#include <algorithm>
#include <bit>
#include <string>
#include <utility>

#include "common/little_endian.h"
#include "common/status_macros.h"
#include "storage/coverage.h"

namespace crumb::storage {
namespace {

// Slots begin on the granule, so that they can be written to disk without a copy, and on pages
// where that costs little: disks fill memory faster that is not cut across its pages.
constexpr SlotAllocator::Rounding kRounding = {.granule_bytes = 512, .page_bytes = 4096};

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
      table_(std::move(policy), kRounding, &inherited_) {
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
  std::optional<Slot> slot;
  std::vector<PageTable::Change> changes;
  uint32_t share = 0;
  bool tenants = false;
  {
    MutexLock lock(&mutex_);
    share = table_.ShareOf(keyspace);
    share_used_[share] = demotion.now;
    slot = Allocate(bytes, share);
    tenants = table_.shares() > 1;
    if (!slot && !tenants) slot = EvictFor(bytes, share, demotion);
    changes = table_.TakeChanges();
  }
  Announce(changes);
  if (!slot && tenants) slot = AllocateFromOthers(bytes, share, demotion);
  if (!slot) {
    return absl::ResourceExhaustedError("every slot of host memory is leased or being written");
  }
  return *slot;
}

std::optional<Slot> HostTier::Allocate(uint64_t bytes, uint32_t share) {
  const auto slot = table_.slots().Allocate(bytes, SlotAllocator::kNoOwner, share);
  if (slot) slabs_[slot->region].written = true;
  return slot;
}

std::optional<Slot> HostTier::EvictFor(uint64_t bytes, uint32_t share, Demotion& demotion) {
  std::optional<Slot> slot;
  while (!slot && EvictOne(share, demotion)) {
    slot = Allocate(bytes, share);
    if (slot) break;
    EmptyChunkFor(bytes, share, demotion.now);
    slot = Allocate(bytes, share);
  }
  return slot;
}

bool HostTier::EvictOne(uint32_t share, Demotion& demotion) {
  // Nothing of its own: no search would find a victim.
  if (inherited_.held_bytes() > 0 && table_.slots().used_bytes() == 0) return false;
  // The slots of an adopted slab are no use to anybody.
  const auto may_go = [this](const Page& page) {
    mutex_.AssertHeld();
    return inherited_.held_bytes() == 0 || table_.HasOwnSlot(page);
  };
  while (true) {
    const auto victim = table_.Victim(demotion.now, may_go, share);
    if (!victim) return false;
    if (Evict(*victim, demotion)) return true;
  }
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

std::vector<TileRange> HostTier::Present(const KeyspaceId& keyspace, const PageKey& key,
                                         uint64_t generation) const {
  std::vector<TileRange> ranges;
  MutexLock lock(&mutex_);
  const PageHandle handle = table_.Find(keyspace, key);
  if (handle == kNoPage || table_[handle].generation < generation) return ranges;
  for (const Fragment& fragment : table_[handle].fragments) ranges.push_back(fragment.range);
  return ranges;
}

std::optional<PageKey> HostTier::ParentOf(const KeyspaceId& keyspace, const PageKey& key) const {
  MutexLock lock(&mutex_);
  const PageHandle handle = table_.Find(keyspace, key);
  if (handle == kNoPage) return std::nullopt;
  return table_[handle].parent;
}

uint64_t HostTier::KeyspaceBytes(const KeyspaceId& keyspace) const {
  MutexLock lock(&mutex_);
  return table_.BytesOf(keyspace);
}

std::vector<PageHandle> HostTier::RefPrefix(const AcquireRequest& request, size_t first,
                                            size_t last, MissReason* miss) {
  std::vector<PageHandle> pages;
  pages.reserve(last - first);
  *miss = MissReason::kNone;
  PageHandle stale = kNoPage;
  std::vector<PageTable::Change> changes;
  {
    MutexLock lock(&mutex_);
    const auto keys = std::span(request.keys).subspan(first, last - first);
    table_.FindEach(request.keyspace, keys, [&](size_t, PageHandle handle) {
      mutex_.AssertHeld();
      if (handle == kNoPage) {
        *miss = MissReason::kAbsent;
      } else if (table_[handle].generation < request.generation) {
        *miss = MissReason::kGeneration;
        stale = handle;
      } else if (!table_[handle].Covers(request.range)) {
        *miss = MissReason::kNotCovered;
      } else {
        table_.Ref(handle);
        pages.push_back(handle);
        return true;
      }
      return false;
    });
    if (stale != kNoPage) table_.Remove(stale, RemovalReason::kDeleted, clock_.Now());
    changes = table_.TakeChanges();
  }
  Announce(changes);
  return pages;
}

void HostTier::Unref(std::span<const PageHandle> pages) {
  MutexLock lock(&mutex_);
  for (const PageHandle page : pages) table_.Unref(page);
}

size_t HostTier::CountPrefix(const AcquireRequest& request, size_t first, size_t last) const {
  size_t count = 0;
  MutexLock lock(&mutex_);
  const auto keys = std::span(request.keys).subspan(first, last - first);
  table_.FindEach(request.keyspace, keys, [&](size_t, PageHandle handle) {
    mutex_.AssertHeld();
    if (handle == kNoPage || table_[handle].generation < request.generation ||
        !table_[handle].Covers(request.range)) {
      return false;
    }
    ++count;
    return true;
  });
  return count;
}

LeaseId HostTier::Lease(const AcquireRequest& request, std::vector<PageHandle> pages,
                        std::span<const Tier> found_in, std::vector<FragmentRef>* fragments) {
  const TimePoint now = clock_.Now();
  fragments->reserve(pages.size());
  MutexLock lock(&mutex_);
  for (size_t i = 0; i < pages.size(); ++i) {
    const Page& page = table_[pages[i]];
    AddRefs(page, i, request.range, fragments);
    if (found_in[i] != Tier::kHost) continue;
    for (const Fragment& fragment : page.fragments) {
      if (Overlaps(fragment.range, request.range)) table_.CountGet(fragment);
    }
  }
  table_.NoteRead(pages, now);
  leased_fragments_ += fragments->size();
  leases_[++last_lease_] = {std::move(pages), fragments->size(), now};
  return last_lease_;
}

void HostTier::Touch(const KeyspaceId& keyspace, std::span<const PageKey> keys) {
  MutexLock lock(&mutex_);
  const uint32_t share = table_.ShareOf(keyspace);
  share_used_[share] = clock_.Now();
  table_.BeginAccess(share);
  for (auto key = keys.rbegin(); key != keys.rend(); ++key) {
    const PageHandle page = table_.Find(keyspace, *key);
    if (page != kNoPage) table_.Hit(page);
  }
}

void HostTier::AddRefs(const Page& page, size_t index, const TileRange& range,
                       std::vector<FragmentRef>* fragments) const {
  for (const Fragment& fragment : page.fragments) {
    if (!Overlaps(fragment.range, range)) continue;
    fragments->push_back({.page = static_cast<uint32_t>(index),
                          .slab = NumberOf(fragment.slot.region),
                          .offset = fragment.slot.offset,
                          .tiles_bytes = fragment.tiles_bytes});
  }
}

std::optional<LeasedPages> HostTier::ReadLease(LeaseId lease, const TileRange& range) const {
  LeasedPages read;
  MutexLock lock(&mutex_);
  const auto found = leases_.find(lease);
  if (found == leases_.end()) return std::nullopt;
  const std::vector<PageHandle>& pages = found->second.pages;
  read.pages = static_cast<uint32_t>(pages.size());
  read.fragments.reserve(pages.size());
  for (size_t i = 0; i < pages.size(); ++i) AddRefs(table_[pages[i]], i, range, &read.fragments);
  return read;
}

bool HostTier::Release(LeaseId lease) {
  MutexLock lock(&mutex_);
  const auto found = leases_.find(lease);
  if (found == leases_.end()) return false;
  for (const PageHandle page : found->second.pages) table_.Unref(page);
  leased_fragments_ -= found->second.fragments;
  leases_.erase(found);
  return true;
}

std::span<const std::byte> HostTier::Bytes(const FragmentRef& fragment) const {
  constexpr size_t kHeaderSizeOffset = 8;  // docs/formats/fragment.md
  const std::byte* begin = Data(RegionOf(fragment.slab)) + fragment.offset;
  const auto header_bytes = LoadLittle<uint32_t>(begin + fragment.tiles_bytes + kHeaderSizeOffset);
  return {begin, size_t{fragment.tiles_bytes} + header_bytes};
}

uint32_t HostTier::Pin(const KeyspaceId& keyspace, std::span<const PageKey> keys, TimePoint until) {
  uint32_t found = 0;
  MutexLock lock(&mutex_);
  for (const PageKey& key : keys) {
    const PageHandle handle = table_.Find(keyspace, key);
    if (handle == kNoPage) continue;
    table_[handle].pinned_until = until;
    ++found;
  }
  return found;
}

std::vector<PageKey> HostTier::Remove(const KeyspaceId& keyspace, std::span<const PageKey> keys) {
  std::vector<PageKey> removed;
  std::vector<PageTable::Change> changes;
  {
    MutexLock lock(&mutex_);
    for (const PageKey& key : keys) {
      const PageHandle handle = table_.Find(keyspace, key);
      if (handle == kNoPage) continue;
      table_.Remove(handle, RemovalReason::kDeleted, clock_.Now());
      removed.push_back(key);
    }
    changes = table_.TakeChanges();
  }
  Announce(changes);
  return removed;
}

std::vector<PageKey> HostTier::Drop(const KeyspaceId& keyspace, uint64_t generation) {
  std::vector<PageKey> removed;
  std::vector<PageTable::Change> changes;
  {
    MutexLock lock(&mutex_);
    table_.RaiseGeneration(keyspace, generation);
    for (const PageHandle handle : table_.PagesBelow(keyspace, generation)) {
      removed.push_back(table_[handle].key);
      table_.Remove(handle, RemovalReason::kDeleted, clock_.Now());
    }
    changes = table_.TakeChanges();
  }
  Announce(changes);
  return removed;
}

void HostTier::ForEachPage(const KeyspaceId& keyspace,
                           const std::function<void(const PageKey&)>& visit) const {
  std::vector<PageKey> keys;
  {
    MutexLock lock(&mutex_);
    table_.ForEachPage(keyspace, [&](const Page& page) { keys.push_back(page.key); });
  }
  for (const PageKey& key : keys) visit(key);
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

void HostTier::CountNotBelow(bool only_hit, PageWalk* walk, NotBelow* counts) const {
  MutexLock lock(&mutex_);
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
    // A page that is only queued here was admitted after the walk began, if reading admits pages.
    const bool unread = only_hit && (!page.was_hit || !absent);
    ++(refused ? counts->refused : unread ? counts->unread : counts->absent);
  }
  walk->over = walk->next == table_.handles_end();
}

std::vector<Departure> HostTier::RefAbsentBelow(const KeyspaceId& keyspace,
                                                std::span<const PageKey> keys) {
  std::vector<Departure> departures;
  MutexLock lock(&mutex_);
  for (const PageKey& key : keys) {
    const PageHandle handle = table_.Find(keyspace, key);
    if (handle != kNoPage) Depart(handle, &departures);
  }
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
  stats.slabs_revoked = revoked_;
  stats.slab_renewals_failed = renewals_failed_;
  for (const SlabState& slab : slabs_) {
    ++(slab.phase == SlabState::Phase::kOwned     ? stats.slabs_owned
       : slab.phase == SlabState::Phase::kClosing ? stats.slabs_closing
                                                  : stats.slabs_gone);
  }
  for (const auto& [id, lease] : leases_) {
    stats.oldest_lease_seconds = std::max(stats.oldest_lease_seconds,
                                          std::chrono::duration<double>(now - lease.since).count());
  }
}

}  // namespace crumb::storage
