// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/statusor.h"
#include "common/clock.h"
#include "common/metrics.h"
#include "storage/fragment_tier.h"
#include "storage/index/eviction_order.h"
#include "storage/index/held_pages.h"
#include "storage/index/page.h"
#include "storage/index/page_entries.h"
#include "storage/loss_ledger.h"
#include "storage/policy/policy.h"
#include "storage/slot_allocator.h"

namespace crumb::storage {

enum class RemovalReason { kCapacity, kDeleted, kCorrupt };

// The index of one tier: which fragments of which pages are in which slots, who refers to them, and
// which order they are evicted in. A page is the unit of eviction: without one of its fragments the
// others are useless. Host memory, each device pool and the SSD tier own one each. It has three
// parts, which it changes together when a page comes or goes:
//
//   pages()  PageEntries    the pages by key and by handle
//   order()  EvictionOrder  which page is evicted next, and the chains of pages
//   held()   HeldPages      the pages that tenants keep by leases and pins (host memory only)
//
// A page is in one of these states:
//
//   state     meaning                              next state, and the call that leads to it
//   absent    Find returns kNoPage                 resident: Insert
//   resident  Find returns it                      absent: Remove, if it has no references
//                                                  removed: Remove, if it has references
//   removed   Find does not return it; its handle  absent: Unref or Unhold of the last reference
//             and slots are valid
//
// A caller that finds a page and releases the tier's lock before it has read the page's bytes takes
// a reference first, by Ref, or by Hold if its bytes count towards a tenant's part, and ends it
// with Unref or Unhold.
//
// The table does no I/O. A call costs O(log n) for each key, page or fragment that it is given or
// returns, whatever else the table has, except for the walks of PageEntries. It is not thread-safe:
// the tier's lock covers it and its parts.
class PageTable {
 public:
  // `slots` has the slots of the fragments: the caller allocates them, and the table frees them.
  // `losses` counts pages that leave for room before all their fragments were stored below, though
  // that was owed; it may be null. Both outlive this.
  PageTable(std::unique_ptr<EvictionPolicy> policy, SlotSpace& slots, LossLedger* losses = nullptr);
  PageTable(const PageTable&) = delete;

  const PageEntries& pages() const { return pages_; }
  EvictionOrder& order() { return order_; }
  const EvictionOrder& order() const { return order_; }
  HeldPages& held() { return held_; }
  Page& operator[](PageHandle page) { return pages_[page]; }
  const Page& operator[](PageHandle page) const { return pages_[page]; }

  // Insert refuses more fragments than this of one page. No bound at first.
  void SetPageFragmentsMax(size_t most) { page_fragments_max_ = most; }
  // REQUIRES: the keyspace has no resident pages, and the partition is one of order().
  void SetPartition(const KeyspaceId& keyspace, uint32_t partition) {
    pages_.MakeSpace(keyspace).partition = partition;
  }
  // Insert refuses pages of a lower generation from now on. Those that are there stay.
  void RaiseGeneration(const KeyspaceId& keyspace, uint64_t generation);

  // Adds a fragment that lies in `slot`. An older generation of the page is removed.
  // kAlreadyExists: the table has some of its tiles; kAborted: its generation was dropped or is
  // older than the page's; kResourceExhausted: the page has as many fragments as it may have. On
  // error the caller still owns the slot.
  absl::StatusOr<PageHandle> Insert(const FragmentMeta& meta, const Slot& slot, Below below,
                                    bool owed, TimePoint now);
  // Whether Insert would take it, with Insert's errors.
  absl::Status CanInsert(const FragmentMeta& meta) const;
  // The fragment's bytes are in `slot` from now on; its former slot is free.
  void MoveFragment(PageHandle page, const TileRange& range, const Slot& slot);
  // Removes a resident page. Its slots are free when it has no references.
  void Remove(PageHandle page, RemovalReason reason, TimePoint now);

  // Keeps a page's fragments and slots, also after Remove, until Unref.
  void Ref(PageHandle page) {
    ++pages_[page].references;
    ++references_;
  }
  void Unref(PageHandle page);
  // Refers to a page for a lease or a read. Returns false, and does not, if it is `bounded` and the
  // tenant would keep more than its part.
  bool Hold(PageHandle page, bool bounded) {
    if (!held_.Hold(pages_[page], bounded)) return false;
    Ref(page);
    return true;
  }
  void Unhold(PageHandle page) {
    held_.Unhold(pages_[page]);
    Unref(page);
  }
  // References to all pages, removed ones included. While it is not 0 some handle is in use, and
  // the table must not be destroyed.
  uint64_t references() const { return references_; }

  // Pages that came and went since the last call: first fragment in, last one out.
  struct Change {
    KeyspaceId keyspace;
    PageKey key;
    bool added = false;
  };
  std::vector<Change> TakeChanges();

  // Notes that pages were read now: for the statistics.
  void NoteRead(std::span<const PageHandle> pages, TimePoint now);
  void CountPut(const FragmentMeta& meta);
  // Counts a fragment that was read.
  void CountGet(uint64_t logical_bytes, uint64_t stored_bytes) {
    stats_.logical_get_bytes += logical_bytes;
    stats_.stored_get_bytes += stored_bytes;
  }
  TierStats Stats() const;

 private:
  void FreeSlots(PageHandle page);
  void CountRemoval(const Page& page, RemovalReason reason, TimePoint now);

  SlotSpace& slots_;
  LossLedger* const losses_;
  PageEntries pages_;
  EvictionOrder order_;
  HeldPages held_;
  uint64_t references_ = 0;
  size_t page_fragments_max_ = SIZE_MAX;
  std::vector<Change> changes_;
  TierStats stats_;  // event counters; Stats() adds the gauges that it computes
  Histogram lifetime_seconds_;
  HistogramSnapshot reuse_seconds_;
};

// A copy of a histogram's state.
HistogramSnapshot SnapshotOf(const Histogram& histogram);

}  // namespace crumb::storage
