// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "absl/container/flat_hash_set.h"
#include "storage/host/host_state.h"

namespace crumb::storage {

// A walk over the pages that were in host memory when it began, a bounded number of them under the
// lock at a time.
struct PageWalk {
  PageHandle next = 0;
  TimePoint begun;
  bool over = false;
};

// Numbers of pages, found by a walk, that the tier below lacks.
struct NotBelow {
  uint64_t absent = 0;
  uint64_t queued = 0;   // fragments of the page are queued
  uint64_t refused = 0;  // the tier below can never store the page
  uint64_t unread = 0;   // the page was never read and is not admitted

  bool any() const { return absent + queued + refused > 0; }
  NotBelow& operator+=(const NotBelow& other) {
    absent += other.absent;
    queued += other.queued;
    refused += other.refused;
    unread += other.unread;
    return *this;
  }
};

// The pages of a walk that count.
struct PageSelection {
  bool only_hit = false;  // those that were read since they came are admitted to the tier below
  std::optional<absl::flat_hash_set<KeyspaceId>> keyspaces;  // none: of all

  bool Has(const KeyspaceId& keyspace) const { return !keyspaces || keyspaces->contains(keyspace); }
};

// Host memory as a tier: look-ups, references and the way of its pages to the tier below. The store
// owns it; HostState has the pages, their states (PageTable) and the lock. A call on many keys,
// pages or fragments takes the lock for pieces of them, so other callers may see a part of it.
//
// A page's way to the tier below: Publish makes a fragment visible, with its state below.
// RefAbsentBelow marks fragments as queued and refers to the page for each, which is a Departure;
// the writer reads its bytes by View and ends it by Return, with the state that the fragment has
// from then on (Below has the states).
//
// REQUIRES: every reference that a call returns is ended once, by Unref, EndWrite or Return.
// Thread-safe.
class HostTier {
 public:
  explicit HostTier(HostState& state) : state_(state) {}
  HostTier(const HostTier&) = delete;

  // Makes the fragment that was written to `slot` visible and returns a reference to its page, for
  // every value of `below`; EndWrite or Return ends the reference. Errors are those of
  // PageTable::Insert, and kResourceExhausted also if the page is held and its tenant would hold
  // more than its part. On error the slot is free.
  absl::StatusOr<PageHandle> Publish(const FragmentMeta& meta, const Slot& slot, Below below,
                                     bool owed);
  // Ends the reference of Publish to a page that is not queued.
  void EndWrite(PageHandle page);

  // Tiles of a page that are there, of this generation or a newer one.
  std::vector<TileRange> Present(const KeyspaceId& keyspace, const PageKey& key,
                                 uint64_t generation) const;
  // Does the same for a writer that commits `range` of the page. Tiles of the range that are not in
  // `below`, the tiles that the tier below has, are owed to the writer from now on.
  std::vector<TileRange> Owe(const KeyspaceId& keyspace, const PageKey& key, uint64_t generation,
                             const TileRange& range, std::span<const TileRange> below);
  // The parent of a page that is there, and the bytes of its fragments, tiles and headers.
  struct PageSummary {
    PageKey parent;
    uint64_t bytes = 0;
  };
  std::optional<PageSummary> Summary(const KeyspaceId& keyspace, const PageKey& key) const;
  uint64_t KeyspaceBytes(const KeyspaceId& keyspace) const;
  // Returns HostState::TenantOf.
  std::string TenantOf(const KeyspaceId& keyspace) const { return state_.TenantOf(keyspace); }

  // Refers to the pages from `first` on that cover the request, up to the first that does not; a
  // page of an older generation is removed. Sets *miss to why it stopped: kBusy if the tenant would
  // keep more than its part.
  std::vector<PageHandle> RefPrefix(const AcquireRequest& request, size_t first, size_t last,
                                    MissReason* miss);
  // Ends references of RefPrefix.
  void Unref(std::span<const PageHandle> pages);
  // How many keys from `first` on are covered; refers to nothing and counts as no use.
  size_t CountPrefix(const AcquireRequest& request, size_t first, size_t last) const;

  // Appends the fragments in request.range of the leading pages, at most request.fragments_max of
  // them, and records that they are read `now`; fragment.page is the index in `pages`. Ends the
  // references to the remaining pages and removes those from `pages`. `found_in` has the tier of
  // each page before it was referred to. Admits the pages, and returns the result of Admit.
  bool NameFragments(const AcquireRequest& request, std::span<const Tier> found_in, TimePoint now,
                     std::vector<PageHandle>* pages, std::vector<FragmentRef>* fragments);
  // With HostState::Options::demote_only_hit, admits pages that were read to the tier below: their
  // fragments that it lacks are owed to their writers from now on. Returns whether such a fragment
  // is not queued yet; RefAbsentBelow queues it.
  bool Admit(const KeyspaceId& keyspace, std::span<const PageKey> keys);
  // The fragments in `range` of pages that the caller refers to.
  std::vector<FragmentRef> FragmentsOf(std::span<const PageHandle> pages,
                                       const TileRange& range) const;
  // Reports to the policy that one access used these pages, in prefix order. It is separate from
  // NameFragments so that a reader does not wait for the policy.
  void Touch(const KeyspaceId& keyspace, std::span<const PageKey> keys);

  std::span<const std::byte> Bytes(const FragmentRef& fragment) const;

  // Pins a page that is here or in the tier below, where it has below_bytes. Returns whether it is
  // here. kResourceExhausted: the tenant would keep more than its part.
  absl::StatusOr<bool> Pin(const KeyspaceId& keyspace, const PageKey& key, uint64_t below_bytes,
                           TimePoint until);
  // The page that was pinned is not in the tier below, or not any more.
  void EndPinBelow(const KeyspaceId& keyspace, const PageKey& key);
  // Returns whether the page is here.
  bool Unpin(const KeyspaceId& keyspace, const PageKey& key);
  // Returns the keys that were there.
  std::vector<PageKey> Remove(const KeyspaceId& keyspace, std::span<const PageKey> keys);
  std::vector<PageKey> Drop(const KeyspaceId& keyspace, uint64_t generation);
  void ForEachPage(const KeyspaceId& keyspace,
                   const std::function<void(const PageKey&)>& visit) const;

  PageWalk BeginWalk() const { return {.begun = state_.clock.Now()}; }
  // Marks fragments of the walk's next pages that are admitted and that the tier below lacks as
  // queued and refers to each. Ends with the page that reaches one of the bounds.
  std::vector<Departure> RefAbsentBelow(const PageSelection& selection, size_t fragments_max,
                                        uint64_t bytes_max, PageWalk* walk);
  // Adds the walk's next pages that the tier below lacks to `counts`.
  void CountNotBelow(const PageSelection& selection, PageWalk* walk, NotBelow* counts) const;
  // Does the same as the first overload for these pages, whether they are admitted or not.
  std::vector<Departure> RefAbsentBelow(const KeyspaceId& keyspace, std::span<const PageKey> keys);
  // The slot's bytes while the page is resident, empty when it was removed.
  std::span<const std::byte> View(const Departure& departure) const;
  // Ends a departure. True when it ended kStored and with it the whole page is below.
  bool Return(const Departure& departure, Below below);
  // The tier below lost the page.
  void ForgetBelow(const KeyspaceId& keyspace, const PageKey& key);

  // Fills stats.host and the fields on slabs.
  void AddStats(StoreStats& stats) const;

 private:
  // Keys or pages that are looked up, referred to or leased before the lock is let go: some 30 us
  // when they are in the processor's cache, 500 us when none is. Each further hold costs a reader
  // up to two switches of threads while others wait for the lock, so a long prompt fits into one.
  static constexpr size_t kPagesPerHold = 2048;
  // Expired pins that each Pin ends, and that one hold of the lock ends for a call that needs their
  // room: some 20 and 150 us.
  static constexpr size_t kExpiredPerPin = 64;
  static constexpr size_t kExpiredPerHold = 512;
  // Calls `work` with one part after the other of `all`, each of at most `most`.
  template <typename T, typename Work>
  static void InPieces(std::span<const T> all, size_t most, Work work) {
    for (size_t begin = 0; begin < all.size(); begin += most) {
      work(all.subspan(begin, std::min(most, all.size() - begin)));
    }
  }

  HostState& state_;
};

}  // namespace crumb::storage
