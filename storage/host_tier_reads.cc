// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
// What readers of a host tier do: looking pages up, leases, pins, and taking pages out. Each call
// works on its keys or pages in pieces and lets the lock go between them.
#include <algorithm>
#include <utility>

#include "common/little_endian.h"
#include "storage/coverage.h"
#include "storage/host_tier.h"

namespace crumb::storage {
namespace {

// Pages of the table that a walk over a keyspace looks at before it lets the lock go: some 100 us.
constexpr size_t kScanPerHold = 4096;
// Keys whose places in the index are brought to the cache before they are looked up.
constexpr size_t kPrefetchAhead = 8;
// Keys whose use the policy hears of before it lets the lock go: up to some 100 us.
constexpr size_t kTouchesPerHold = 512;
// Fragments that a lease names before it lets the lock go.
constexpr size_t kFragmentsPerHold = 8192;

}  // namespace

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

uint64_t HostTier::PageBytes(const KeyspaceId& keyspace, const PageKey& key) const {
  MutexLock lock(&mutex_);
  const PageHandle page = table_.Find(keyspace, key);
  if (page == kNoPage) return 0;
  uint64_t bytes = 0;
  for (const Fragment& fragment : table_[page].fragments) bytes += fragment.bytes;
  return bytes;
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
  for (size_t next = first; next < last && *miss == MissReason::kNone;) {
    const size_t count = std::min(last - next, kPagesPerHold);
    MutexLock lock(&mutex_);
    const auto keys = std::span(request.keys).subspan(next, count);
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
    next += count;
    if (stale == kNoPage) continue;
    table_.Remove(stale, RemovalReason::kDeleted, clock_.Now());
    changes = table_.TakeChanges();
  }
  Announce(changes);
  return pages;
}

void HostTier::Unref(std::span<const PageHandle> pages) {
  InPieces(pages, kPagesPerHold, [&](std::span<const PageHandle> piece) {
    MutexLock lock(&mutex_);
    for (const PageHandle page : piece) table_.Unref(page);
  });
}

size_t HostTier::CountPrefix(const AcquireRequest& request, size_t first, size_t last) const {
  size_t count = 0;
  bool complete = true;
  for (size_t next = first; next < last && complete; next += kPagesPerHold) {
    MutexLock lock(&mutex_);
    const auto keys = std::span(request.keys).subspan(next, std::min(last - next, kPagesPerHold));
    table_.FindEach(request.keyspace, keys, [&](size_t, PageHandle handle) {
      mutex_.AssertHeld();
      complete = handle != kNoPage && table_[handle].generation >= request.generation &&
                 table_[handle].Covers(request.range);
      if (complete) ++count;
      return complete;
    });
  }
  return count;
}

inline void HostTier::AddRefs(const Page& page, size_t index, const TileRange& range,
                              std::vector<FragmentRef>* fragments) const {
  for (const Fragment& fragment : page.fragments) {
    if (!Overlaps(fragment.range, range)) continue;
    fragments->push_back({.page = static_cast<uint32_t>(index),
                          .slab = NumberOf(fragment.slot.region),
                          .offset = fragment.slot.offset,
                          .tiles_bytes = fragment.tiles_bytes});
  }
}

inline bool HostTier::AddLeased(PageHandle handle, size_t index, Tier found_in,
                                const AcquireRequest& request,
                                std::vector<FragmentRef>* fragments) {
  const Page& page = table_[handle];
  const size_t before = fragments->size();
  AddRefs(page, index, request.range, fragments);
  if (fragments->size() > request.fragments_max) {
    fragments->resize(before);
    return false;
  }
  if (found_in != Tier::kHost) return true;
  const bool all = fragments->size() - before == page.fragments.size();
  for (const Fragment& fragment : page.fragments) {
    if (all || Overlaps(fragment.range, request.range)) table_.CountGet(fragment);
  }
  return true;
}

HostTier::Leased HostTier::Lease(const AcquireRequest& request, std::vector<PageHandle> pages,
                                 std::span<const Tier> found_in,
                                 std::vector<FragmentRef>* fragments) {
  const TimePoint now = clock_.Now();
  fragments->reserve(std::min(pages.size(), request.fragments_max));
  std::vector<PageHandle> left_out;
  Leased leased;
  for (bool full = false, ended = false; !ended;) {
    const size_t begin = leased.pages;
    const size_t end = std::min(pages.size(), begin + kPagesPerHold);
    const size_t fragments_before = fragments->size();
    MutexLock lock(&mutex_);
    while (leased.pages < end && fragments->size() < fragments_before + kFragmentsPerHold) {
      full =
          !AddLeased(pages[leased.pages], leased.pages, found_in[leased.pages], request, fragments);
      if (full) break;
      ++leased.pages;
    }
    table_.NoteRead(std::span(pages).subspan(begin, leased.pages - begin), now);
    ended = full || leased.pages == pages.size();
    if (!ended) continue;
    left_out.assign(pages.begin() + static_cast<ptrdiff_t>(leased.pages), pages.end());
    pages.resize(leased.pages);
    if (pages.empty()) break;
    leased_fragments_ += fragments->size();
    leased.id = ++last_lease_;
    leases_[leased.id] = {std::move(pages), fragments->size(), now};
  }
  Unref(left_out);
  return leased;
}

void HostTier::Touch(const KeyspaceId& keyspace, std::span<const PageKey> keys) {
  for (size_t end = keys.size(); end > 0;) {
    const size_t count = std::min(end, kTouchesPerHold);
    MutexLock lock(&mutex_);
    if (end == keys.size()) {
      const uint32_t share = table_.ShareOf(keyspace);
      share_used_[share] = clock_.Now();
      table_.BeginAccess(share);
    }
    const std::span<const PageKey> piece = keys.subspan(end - count, count);
    const PageTable::View pages = table_.ViewOf(keyspace);
    for (size_t i = piece.size(); i-- > 0;) {
      if (i >= kPrefetchAhead) pages.Prefetch(piece[i - kPrefetchAhead]);
      const PageHandle page = pages.Find(piece[i]);
      if (page != kNoPage) table_.Hit(page);
    }
    end -= count;
  }
}

// Between two pieces the lease may end: then nothing was read.
std::optional<LeasedPages> HostTier::ReadLease(LeaseId lease, const TileRange& range) const {
  LeasedPages read;
  size_t next = 0;
  do {
    MutexLock lock(&mutex_);
    const auto found = leases_.find(lease);
    if (found == leases_.end()) return std::nullopt;
    const std::vector<PageHandle>& pages = found->second.pages;
    read.pages = static_cast<uint32_t>(pages.size());
    const size_t fragments_before = read.fragments.size();
    const size_t end = std::min(pages.size(), next + kPagesPerHold);
    while (next < end && read.fragments.size() < fragments_before + kFragmentsPerHold) {
      AddRefs(table_[pages[next]], next, range, &read.fragments);
      ++next;
    }
  } while (next < read.pages);
  return read;
}

bool HostTier::Release(LeaseId lease) {
  std::vector<PageHandle> pages;
  {
    MutexLock lock(&mutex_);
    const auto found = leases_.find(lease);
    if (found == leases_.end()) return false;
    pages = std::move(found->second.pages);
    leased_fragments_ -= found->second.fragments;
    leases_.erase(found);
  }
  Unref(pages);
  return true;
}

std::span<const std::byte> HostTier::Bytes(const FragmentRef& fragment) const {
  constexpr size_t kHeaderSizeOffset = 8;  // docs/formats/fragment.md
  const std::byte* begin = Data(RegionOf(fragment.slab)) + fragment.offset;
  const auto header_bytes = LoadLittle<uint32_t>(begin + fragment.tiles_bytes + kHeaderSizeOffset);
  return {begin, size_t{fragment.tiles_bytes} + header_bytes};
}

uint32_t HostTier::Pin(const KeyspaceId& keyspace, std::span<const PageKey> keys, TimePoint until) {
  uint32_t pinned = 0;
  InPieces(keys, kPagesPerHold, [&](std::span<const PageKey> piece) {
    MutexLock lock(&mutex_);
    for (const PageKey& key : piece) {
      const PageHandle handle = table_.Find(keyspace, key);
      if (handle == kNoPage) continue;
      table_[handle].pinned_until = until;
      ++pinned;
    }
  });
  return pinned;
}

std::vector<PageKey> HostTier::Remove(const KeyspaceId& keyspace, std::span<const PageKey> keys) {
  std::vector<PageKey> removed;
  InPieces(keys, kRemovalsPerHold, [&](std::span<const PageKey> piece) {
    std::vector<PageTable::Change> changes;
    {
      MutexLock lock(&mutex_);
      for (const PageKey& key : piece) {
        const PageHandle handle = table_.Find(keyspace, key);
        if (handle == kNoPage) continue;
        table_.Remove(handle, RemovalReason::kDeleted, clock_.Now());
        removed.push_back(key);
      }
      changes = table_.TakeChanges();
    }
    Announce(changes);
  });
  return removed;
}

// With the generation raised, no page below it is a hit or comes back, so the rest may take a
// while.
std::vector<PageKey> HostTier::Drop(const KeyspaceId& keyspace, uint64_t generation) {
  std::vector<PageKey> removed;
  PageHandle next = 0;
  {
    MutexLock lock(&mutex_);
    table_.RaiseGeneration(keyspace, generation);
  }
  while (next != kNoPage) {
    std::vector<PageTable::Change> changes;
    {
      MutexLock lock(&mutex_);
      std::vector<PageHandle> older;
      next = table_.Scan(keyspace, next, kScanPerHold, [&](PageHandle handle, const Page& page) {
        if (page.generation < generation) older.push_back(handle);
      });
      for (const PageHandle handle : older) {
        removed.push_back(table_[handle].key);
        table_.Remove(handle, RemovalReason::kDeleted, clock_.Now());
      }
      changes = table_.TakeChanges();
    }
    Announce(changes);
  }
  return removed;
}

void HostTier::ForEachPage(const KeyspaceId& keyspace,
                           const std::function<void(const PageKey&)>& visit) const {
  for (PageHandle next = 0; next != kNoPage;) {
    std::vector<PageKey> keys;
    {
      MutexLock lock(&mutex_);
      next = table_.Scan(keyspace, next, kScanPerHold,
                         [&](PageHandle, const Page& page) { keys.push_back(page.key); });
    }
    for (const PageKey& key : keys) visit(key);
  }
}

}  // namespace crumb::storage
