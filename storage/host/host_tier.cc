// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "storage/host/host_tier.h"

#include <algorithm>
#include <string>
#include <utility>

#include "absl/base/attributes.h"
#include "storage/bounds.h"
#include "storage/coverage.h"

namespace crumb::storage {
namespace {

// Pages that one step of a walk looks at under the lock.
constexpr PageHandle kWalkPages = 4096;
// Pages of the table that a walk over a keyspace examines before it releases the lock: some 100 us.
constexpr size_t kScanPerHold = 4096;
// Keys whose use is reported to the policy before the lock is released: up to some 100 us.
constexpr size_t kTouchesPerHold = 512;
// Fragments that a lease names before the lock is released.
constexpr size_t kFragmentsPerHold = 8192;

// Appends the fragments of page `index` of a request that intersect `range`. AddRefs and AddRead
// are inlined because a call would double the cost per page.
ABSL_ATTRIBUTE_ALWAYS_INLINE inline void AddRefs(const HostState& state, const Page& page,
                                                 size_t index, const TileRange& range,
                                                 std::vector<FragmentRef>* fragments)
    ABSL_EXCLUSIVE_LOCKS_REQUIRED(state.mutex) {
  for (const Fragment& fragment : page.fragments) {
    if (!Overlaps(fragment.range, range)) continue;
    fragments->push_back({.page = static_cast<uint32_t>(index),
                          .slab = state.NumberOf(fragment.slot.region),
                          .offset = fragment.slot.offset,
                          .tiles_bytes = fragment.tiles_bytes});
  }
}

// Appends the fragments of a page that is leased. Returns false if they would be too many.
ABSL_ATTRIBUTE_ALWAYS_INLINE inline bool AddRead(HostState& state, PageHandle handle, size_t index,
                                                 Tier found_in, const AcquireRequest& request,
                                                 std::vector<FragmentRef>* fragments)
    ABSL_EXCLUSIVE_LOCKS_REQUIRED(state.mutex) {
  const Page& page = state.table[handle];
  const size_t before = fragments->size();
  AddRefs(state, page, index, request.range, fragments);
  if (fragments->size() > request.fragments_max) {
    fragments->resize(before);
    return false;
  }
  if (found_in != Tier::kHost) return true;
  const bool all = fragments->size() - before == page.fragments.size();
  for (const Fragment& fragment : page.fragments) {
    if (all || Overlaps(fragment.range, request.range))
      state.table.CountGet(fragment.logical_bytes(), fragment.bytes);
  }
  return true;
}

// Implements HostTier::Admit for one page.
bool AdmitPage(HostState& state, PageHandle handle) ABSL_EXCLUSIVE_LOCKS_REQUIRED(state.mutex) {
  Page& page = state.table[handle];
  page.was_hit = true;
  bool lacking = false;
  for (Fragment& fragment : page.fragments) {
    fragment.owed |= fragment.below != Below::kStored;
    lacking |= fragment.below == Below::kAbsent;
  }
  return lacking;
}

absl::Status HeldPartError() {
  return absl::ResourceExhaustedError(
      "store.host.bytes_max: the tenant's leases and pins keep its part of it "
      "(tenants.part_max_percent), release some");
}

}  // namespace

absl::StatusOr<PageHandle> HostTier::Publish(const FragmentMeta& meta, const Slot& slot,
                                             Below below, bool owed) {
  const TimePoint now = state_.clock.Now();
  absl::StatusOr<PageHandle> page;
  std::vector<PageTable::Change> changes;
  for (bool decided = false; !decided;) {
    MutexLock lock(&state_.mutex);
    const bool fits = state_.table.held().MayInsert(meta, slot, below);
    decided = fits || state_.table.held().ExpirePins(now, kExpiredPerHold) == 0;
    if (!decided) continue;
    state_.table.order().BeginAccess(state_.table.pages().PartitionOf(meta.keyspace));
    if (!fits) {
      page = HeldPartError();
    } else {
      page = state_.slabs[slot.region].partition == state_.table.pages().PartitionOf(meta.keyspace)
                 ? state_.table.Insert(meta, slot, below, owed, now)
                 : absl::ResourceExhaustedError("the keyspace became another tenant's meanwhile");
    }
    if (page.ok()) {
      state_.table.Ref(*page);
      state_.table.CountPut(meta);
    } else {
      state_.slabs.Free(slot);
    }
    changes = state_.table.TakeChanges();
  }
  state_.Announce(changes);
  return page;
}

void HostTier::EndWrite(PageHandle page) {
  MutexLock lock(&state_.mutex);
  state_.table.Unref(page);
}

std::vector<TileRange> HostTier::Present(const KeyspaceId& keyspace, const PageKey& key,
                                         uint64_t generation) const {
  std::vector<TileRange> ranges;
  MutexLock lock(&state_.mutex);
  const PageHandle handle = state_.table.pages().Find(keyspace, key);
  if (handle == kNoPage || state_.table[handle].generation < generation) return ranges;
  for (const Fragment& fragment : state_.table[handle].fragments) ranges.push_back(fragment.range);
  return ranges;
}

std::vector<TileRange> HostTier::Owe(const KeyspaceId& keyspace, const PageKey& key,
                                     uint64_t generation, const TileRange& range,
                                     std::span<const TileRange> below) {
  std::vector<TileRange> ranges;
  MutexLock lock(&state_.mutex);
  const PageHandle handle = state_.table.pages().Find(keyspace, key);
  if (handle == kNoPage || state_.table[handle].generation < generation) return ranges;
  for (Fragment& fragment : state_.table[handle].fragments) {
    ranges.push_back(fragment.range);
    if (!Overlaps(fragment.range, range) || Covers(below, fragment.range)) continue;
    fragment.owed = fragment.owed_again = true;
    // The tier below has lost it and has not said so yet.
    if (fragment.below == Below::kStored) fragment.below = Below::kAbsent;
  }
  return ranges;
}

std::optional<HostTier::PageSummary> HostTier::Summary(const KeyspaceId& keyspace,
                                                       const PageKey& key) const {
  MutexLock lock(&state_.mutex);
  const PageHandle handle = state_.table.pages().Find(keyspace, key);
  if (handle == kNoPage) return std::nullopt;
  const Page& page = state_.table[handle];
  PageSummary summary = {.parent = page.parent};
  for (const Fragment& fragment : page.fragments) summary.bytes += fragment.bytes;
  return summary;
}

uint64_t HostTier::KeyspaceBytes(const KeyspaceId& keyspace) const {
  MutexLock lock(&state_.mutex);
  return state_.table.pages().BytesOf(keyspace);
}

std::vector<PageHandle> HostTier::RefPrefix(const AcquireRequest& request, size_t first,
                                            size_t last, MissReason* miss) {
  std::vector<PageHandle> pages;
  pages.reserve(last - first);
  *miss = MissReason::kNone;
  PageHandle stale = kNoPage;
  std::vector<PageTable::Change> changes;
  for (size_t next = first; next < last && *miss == MissReason::kNone;) {
    const size_t count = std::min(last - next, kPagesPerHold);
    MutexLock lock(&state_.mutex);
    PageTable& table = state_.table;
    const auto keys = std::span(request.keys).subspan(next, count);
    table.pages().FindEach(request.keyspace, keys, [&](size_t, PageHandle handle) {
      state_.mutex.AssertHeld();
      if (handle == kNoPage) {
        *miss = MissReason::kAbsent;
        return false;
      }
      const Page& page = table[handle];
      if (page.generation < request.generation) {
        *miss = MissReason::kGeneration;
        stale = handle;
        return false;
      }
      if (!page.Covers(request.range)) {
        *miss = MissReason::kNotCovered;
        return false;
      }
      if (!table.Hold(handle, request.within_part)) {
        *miss = MissReason::kBusy;
        return false;
      }
      pages.push_back(handle);
      return true;
    });
    if (*miss == MissReason::kBusy &&
        table.held().ExpirePins(state_.clock.Now(), kExpiredPerHold) > 0) {
      *miss = MissReason::kNone;
      next = first + pages.size();
      continue;
    }
    next += count;
    if (stale == kNoPage) continue;
    table.Remove(stale, RemovalReason::kDeleted, state_.clock.Now());
    changes = table.TakeChanges();
  }
  state_.Announce(changes);
  return pages;
}

void HostTier::Unref(std::span<const PageHandle> pages) {
  InPieces(pages, kPagesPerHold, [&](std::span<const PageHandle> piece) {
    MutexLock lock(&state_.mutex);
    PageTable& table = state_.table;
    for (const PageHandle page : piece) table.Unhold(page);
  });
}

size_t HostTier::CountPrefix(const AcquireRequest& request, size_t first, size_t last) const {
  size_t count = 0;
  bool complete = true;
  for (size_t next = first; next < last && complete; next += kPagesPerHold) {
    MutexLock lock(&state_.mutex);
    const auto keys = std::span(request.keys).subspan(next, std::min(last - next, kPagesPerHold));
    state_.table.pages().FindEach(request.keyspace, keys, [&](size_t, PageHandle handle) {
      state_.mutex.AssertHeld();
      complete = handle != kNoPage && state_.table[handle].generation >= request.generation &&
                 state_.table[handle].Covers(request.range);
      if (complete) ++count;
      return complete;
    });
  }
  return count;
}

bool HostTier::NameFragments(const AcquireRequest& request, std::span<const Tier> found_in,
                             TimePoint now, std::vector<PageHandle>* pages,
                             std::vector<FragmentRef>* fragments) {
  fragments->reserve(std::min(pages->size(), request.fragments_max));
  HostState& state = state_;
  size_t named = 0;
  bool lacking = false;
  for (bool full = false; !full && named < pages->size();) {
    const size_t begin = named;
    const size_t end = std::min(pages->size(), begin + kPagesPerHold);
    const size_t fragments_before = fragments->size();
    MutexLock lock(&state.mutex);
    while (named < end && fragments->size() < fragments_before + kFragmentsPerHold) {
      full = !AddRead(state, (*pages)[named], named, found_in[named], request, fragments);
      if (full) break;
      if (state.options.demote_only_hit) lacking |= AdmitPage(state, (*pages)[named]);
      ++named;
    }
    state.table.NoteRead(std::span(*pages).subspan(begin, named - begin), now);
  }
  Unref(std::span(*pages).subspan(named));
  pages->resize(named);
  return lacking;
}

bool HostTier::Admit(const KeyspaceId& keyspace, std::span<const PageKey> keys) {
  bool lacking = false;
  if (!state_.options.demote_only_hit) return lacking;
  InPieces(keys, kPagesPerHold, [&](std::span<const PageKey> piece) {
    MutexLock lock(&state_.mutex);
    for (const PageKey& key : piece) {
      const PageHandle handle = state_.table.pages().Find(keyspace, key);
      if (handle != kNoPage) lacking |= AdmitPage(state_, handle);
    }
  });
  return lacking;
}

std::vector<FragmentRef> HostTier::FragmentsOf(std::span<const PageHandle> pages,
                                               const TileRange& range) const {
  std::vector<FragmentRef> fragments;
  const HostState& state = state_;
  for (size_t next = 0; next < pages.size();) {
    const size_t end = std::min(pages.size(), next + kPagesPerHold);
    const size_t fragments_before = fragments.size();
    MutexLock lock(&state.mutex);
    while (next < end && fragments.size() < fragments_before + kFragmentsPerHold) {
      AddRefs(state, state.table[pages[next]], next, range, &fragments);
      ++next;
    }
  }
  return fragments;
}

void HostTier::Touch(const KeyspaceId& keyspace, std::span<const PageKey> keys) {
  for (size_t end = keys.size(); end > 0;) {
    const size_t count = std::min(end, kTouchesPerHold);
    MutexLock lock(&state_.mutex);
    if (end == keys.size()) {
      const uint32_t partition = state_.table.pages().PartitionOf(keyspace);
      state_.slabs.NoteUse(partition, state_.clock.Now());
      state_.table.order().BeginAccess(partition);
    }
    const std::span<const PageKey> piece = keys.subspan(end - count, count);
    const PageEntries::View pages = state_.table.pages().ViewOf(keyspace);
    for (size_t i = piece.size(); i-- > 0;) {
      if (i >= kPrefetchAhead) pages.Prefetch(piece[i - kPrefetchAhead]);
      const PageHandle page = pages.Find(piece[i]);
      if (page != kNoPage) state_.table.order().Hit(page);
    }
    end -= count;
  }
}

std::span<const std::byte> HostTier::Bytes(const FragmentRef& fragment) const {
  const std::byte* begin = state_.Data(state_.RegionOf(fragment.slab)) + fragment.offset;
  return {begin, fragment.tiles_bytes + EncodedHeaderBytes(begin + fragment.tiles_bytes)};
}

absl::StatusOr<bool> HostTier::Pin(const KeyspaceId& keyspace, const PageKey& key,
                                   uint64_t below_bytes, TimePoint until) {
  const TimePoint now = state_.clock.Now();
  for (size_t expire = kExpiredPerPin;; expire = kExpiredPerHold) {
    MutexLock lock(&state_.mutex);
    const size_t expired = state_.table.held().ExpirePins(now, expire);
    if (state_.table.held().Pin(keyspace, key, below_bytes, until)) {
      return state_.table.pages().Find(keyspace, key) != kNoPage;
    }
    if (expired < expire) return HeldPartError();
  }
}

void HostTier::EndPinBelow(const KeyspaceId& keyspace, const PageKey& key) {
  MutexLock lock(&state_.mutex);
  state_.table.held().ForgetBelow(keyspace, key);
}

bool HostTier::Unpin(const KeyspaceId& keyspace, const PageKey& key) {
  MutexLock lock(&state_.mutex);
  state_.table.held().Unpin(keyspace, key);
  return state_.table.pages().Find(keyspace, key) != kNoPage;
}

std::vector<PageKey> HostTier::Remove(const KeyspaceId& keyspace, std::span<const PageKey> keys) {
  std::vector<PageKey> removed;
  InPieces(keys, kHostRemovalsPerHold, [&](std::span<const PageKey> piece) {
    std::vector<PageTable::Change> changes;
    {
      MutexLock lock(&state_.mutex);
      for (const PageKey& key : piece) {
        const PageHandle handle = state_.table.pages().Find(keyspace, key);
        if (handle == kNoPage) continue;
        state_.table.Remove(handle, RemovalReason::kDeleted, state_.clock.Now());
        removed.push_back(key);
      }
      changes = state_.table.TakeChanges();
    }
    state_.Announce(changes);
  });
  return removed;
}

// With the generation raised, no page below it is a hit or comes back, so the rest may take a
// while.
std::vector<PageKey> HostTier::Drop(const KeyspaceId& keyspace, uint64_t generation) {
  std::vector<PageKey> removed;
  PageHandle next = 0;
  {
    MutexLock lock(&state_.mutex);
    state_.table.RaiseGeneration(keyspace, generation);
  }
  while (next != kNoPage) {
    std::vector<PageTable::Change> changes;
    {
      MutexLock lock(&state_.mutex);
      std::vector<PageHandle> older;
      next = state_.table.pages().Scan(keyspace, next, kScanPerHold,
                                       [&](PageHandle handle, const Page& page) {
                                         if (page.generation < generation) older.push_back(handle);
                                       });
      for (const PageHandle handle : older) {
        removed.push_back(state_.table[handle].key);
        state_.table.Remove(handle, RemovalReason::kDeleted, state_.clock.Now());
      }
      changes = state_.table.TakeChanges();
    }
    state_.Announce(changes);
  }
  return removed;
}

void HostTier::ForEachPage(const KeyspaceId& keyspace,
                           const std::function<void(const PageKey&)>& visit) const {
  for (PageHandle next = 0; next != kNoPage;) {
    std::vector<PageKey> keys;
    {
      MutexLock lock(&state_.mutex);
      next = state_.table.pages().Scan(
          keyspace, next, kScanPerHold,
          [&](PageHandle, const Page& page) { keys.push_back(page.key); });
    }
    for (const PageKey& key : keys) visit(key);
  }
}

std::vector<Departure> HostTier::RefAbsentBelow(const PageSelection& selection,
                                                size_t fragments_max, uint64_t bytes_max,
                                                PageWalk* walk) {
  std::vector<Departure> departures;
  uint64_t bytes = 0;
  MutexLock lock(&state_.mutex);
  const PageHandle end = std::min(state_.table.pages().handles_end(), walk->next + kWalkPages);
  for (; walk->next < end && departures.size() < fragments_max && bytes < bytes_max; ++walk->next) {
    const Page& page = state_.table[walk->next];
    if (!page.resident || page.added > walk->begun) continue;
    if ((selection.only_hit && !page.was_hit) || !selection.Has(page.keyspace)) continue;
    const size_t before = departures.size();
    state_.Depart(walk->next, &departures);
    for (size_t i = before; i < departures.size(); ++i) bytes += departures[i].meta.bytes;
  }
  walk->over = walk->next == state_.table.pages().handles_end();
  return departures;
}

void HostTier::CountNotBelow(const PageSelection& selection, PageWalk* walk,
                             NotBelow* counts) const {
  MutexLock lock(&state_.mutex);
  const PageHandle end = std::min(state_.table.pages().handles_end(), walk->next + kWalkPages);
  for (; walk->next < end; ++walk->next) {
    const Page& page = state_.table[walk->next];
    if (!page.resident || page.added > walk->begun) continue;
    bool absent = false;
    bool queued = false;
    bool refused = false;
    for (const Fragment& fragment : page.fragments) {
      absent |= fragment.below == Below::kAbsent;
      queued |= fragment.below == Below::kQueued;
      refused |= fragment.below == Below::kRefused;
    }
    if ((!absent && !queued && !refused) || !selection.Has(page.keyspace)) continue;
    const bool unread = selection.only_hit && !page.was_hit;
    ++(refused  ? counts->refused
       : unread ? counts->unread
       : absent ? counts->absent
                : counts->queued);
  }
  walk->over = walk->next == state_.table.pages().handles_end();
}

std::vector<Departure> HostTier::RefAbsentBelow(const KeyspaceId& keyspace,
                                                std::span<const PageKey> keys) {
  std::vector<Departure> departures;
  InPieces(keys, kHostRemovalsPerHold, [&](std::span<const PageKey> piece) {
    MutexLock lock(&state_.mutex);
    for (const PageKey& key : piece) {
      const PageHandle handle = state_.table.pages().Find(keyspace, key);
      if (handle != kNoPage) state_.Depart(handle, &departures);
    }
  });
  return departures;
}

std::span<const std::byte> HostTier::View(const Departure& departure) const {
  MutexLock lock(&state_.mutex);
  const Page& page = state_.table[departure.page];
  if (!page.resident) return {};
  for (const Fragment& fragment : page.fragments) {
    if (fragment.range == departure.meta.range) return state_.Memory(fragment.slot);
  }
  return {};
}

bool HostTier::Return(const Departure& departure, Below below) {
  MutexLock lock(&state_.mutex);
  Page& page = state_.table[departure.page];
  for (Fragment& fragment : page.fragments) {
    if (fragment.range != departure.meta.range) continue;
    fragment.below = below;
    if (below == Below::kStored) fragment.owed = fragment.owed_again;
  }
  const bool all_below =
      page.resident && below == Below::kStored &&
      std::all_of(page.fragments.begin(), page.fragments.end(),
                  [](const Fragment& fragment) { return fragment.below == Below::kStored; });
  state_.table.Unref(departure.page);
  return all_below;
}

void HostTier::ForgetBelow(const KeyspaceId& keyspace, const PageKey& key) {
  MutexLock lock(&state_.mutex);
  state_.table.held().ForgetBelow(keyspace, key);
  const PageHandle handle = state_.table.pages().Find(keyspace, key);
  if (handle == kNoPage) return;
  for (Fragment& fragment : state_.table[handle].fragments) {
    if (fragment.below == Below::kStored) fragment.below = Below::kAbsent;
  }
}

void HostTier::AddStats(StoreStats& stats) const {
  MutexLock lock(&state_.mutex);
  stats.host = state_.table.Stats();
  stats.held_bytes = state_.table.held().bytes();
  state_.slabs.AddStats(stats);
}

}  // namespace crumb::storage
