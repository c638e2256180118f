// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "common/mutex.h"
#include "storage/host_image.h"
#include "storage/inherited_slabs.h"
#include "storage/loss_ledger.h"
#include "storage/page_table.h"
#include "storage/slab_memory.h"
#include "storage/store_options.h"
#include "storage/tiered_store.h"

namespace crumb::storage {

// Sizes what a policy remembers of evicted pages; a page of a small model.
inline constexpr uint64_t kTypicalPageBytes = 256 << 10;

// A reference to one fragment of a host page that is on its way to the tier below.
struct Departure {
  PageHandle page = kNoPage;  // referred to
  FragmentMeta meta;
  Below otherwise = Below::kAbsent;  // how the fragment stands if it is not written
};

// A walk over the pages that were in host memory when it began, a bounded number of them under the
// lock at a time.
struct PageWalk {
  PageHandle next = 0;
  TimePoint begun;
  bool over = false;
};

// Pages of a walk that the tier below lacks.
struct NotBelow {
  uint64_t absent = 0;
  uint64_t queued = 0;   // on their way there
  uint64_t refused = 0;  // can never be stored there
  uint64_t unread = 0;   // not admitted

  bool any() const { return absent + queued + refused > 0; }
  NotBelow& operator+=(const NotBelow& other) {
    absent += other.absent;
    queued += other.queued;
    refused += other.refused;
    unread += other.unread;
    return *this;
  }
};
struct NotBelowCounts {
  NotBelow all;
  std::map<std::string, NotBelow> tenants;  // those with such pages
};

// Host memory as a tier: slots in slabs, who refers to them, leases. Its one lock is held for
// bookkeeping only, and let go between pieces of a long call: a call on many keys, pages or
// fragments is not one step to others, who may see a part of it. Thread-safe.
class HostTier {
 public:
  struct Options {
    HostOptions host;
    // Leaving pages that the tier below lacks are handed to `demote` if they are worth it.
    bool demote_only_hit = false;
    // The part of host.bytes_max that Open takes; Grow takes the rest.
    uint64_t first_bytes = UINT64_MAX;
    SlabMemory::Sharing sharing = SlabMemory::Sharing::kFixed;
    // As StoreStart::free_memory.
    std::function<uint64_t()> free_memory = {};
    // Fragments that one page may have.
    size_t page_fragments_max = SIZE_MAX;
    // Told, without the lock, when nothing will be read in a slab any more.
    std::function<void(uint32_t slab)> slab_gone = {};
    // The base of the marks for Flush (LossLedger), unless adopted memory brings its own.
    uint64_t mark_base = 0;
  };
  struct Adopted {
    uint64_t pages = 0;
    uint64_t left_out =
        0;  // that did not check, were dropped, or lie in slabs there is no room for
  };

  // `removed` and `added` are called without the lock.
  static absl::StatusOr<std::unique_ptr<HostTier>> Open(const Options& options, const Clock& clock,
                                                        FragmentTierEvents events);

  // As TieredStore has them.
  void SetOwner(const KeyspaceId& keyspace, const std::string& tenant);
  void ForgetOwner(const KeyspaceId& keyspace);
  // Keeps the keyspace's pages in slabs of this tenant's own from now on; those that are elsewhere
  // leave host memory, and are lost if the tier below lacks them. Keyspaces of no tenant share
  // slabs of theirs. kFailedPrecondition: the slabs cannot change their tenants.
  absl::Status SetTenant(const KeyspaceId& keyspace, const std::string& tenant);
  // A descriptor for reading of a slab that pages of this keyspace lie in, for a process to map.
  // Its file never holds another tenant's pages. kPermissionDenied: the slab is not of the
  // keyspace's tenant, or holds none of its pages.
  absl::StatusOr<UniqueFd> OpenSlab(uint32_t slab, const KeyspaceId& keyspace) const;

  // A slot for `bytes` in a slab of the keyspace's tenant, not visible yet, evicting pages of that
  // tenant for it, or emptying another's slab where that one has more than its part. Pages that the
  // tier below lacks are kept and returned as departures, to be queued, up to
  // `departing_bytes_max`; beyond that they are lost. kResourceExhausted: every slot is in use or
  // referred to; kInvalidArgument: no slab is so large.
  absl::StatusOr<Slot> Reserve(const KeyspaceId& keyspace, uint64_t bytes,
                               uint64_t departing_bytes_max, std::vector<Departure>* departures);
  std::span<std::byte> Memory(const Slot& slot) const;
  void Abandon(const Slot& slot);
  // Makes what was written to `slot` visible and returns a reference to its page, below == kQueued
  // or not. Errors as PageTable::Insert, and the slot is abandoned.
  absl::StatusOr<PageHandle> Publish(const FragmentMeta& meta, const Slot& slot, Below below);

  // Tiles of a page that are there, of this generation or a newer one.
  std::vector<TileRange> Present(const KeyspaceId& keyspace, const PageKey& key,
                                 uint64_t generation) const;

  std::optional<PageKey> ParentOf(const KeyspaceId& keyspace, const PageKey& key) const;
  uint64_t KeyspaceBytes(const KeyspaceId& keyspace) const;
  uint64_t PageBytes(const KeyspaceId& keyspace, const PageKey& key) const;

  // Refers to the pages from `first` on that cover the request, up to the first that does not; a
  // page of an older generation is removed. Sets *miss to why it stopped.
  std::vector<PageHandle> RefPrefix(const AcquireRequest& request, size_t first, size_t last,
                                    MissReason* miss);
  void Unref(std::span<const PageHandle> pages);
  // How many keys from `first` on are covered; refers to nothing and counts as no use.
  size_t CountPrefix(const AcquireRequest& request, size_t first, size_t last) const;

  // Turns references into a lease of the first pages that have no more than request.fragments_max
  // fragments in request.range, names those fragments, and gives the other references back.
  struct Leased {
    LeaseId id = 0;  // 0: no page is leased
    size_t pages = 0;
  };
  Leased Lease(const AcquireRequest& request, std::vector<PageHandle> pages,
               std::span<const Tier> found_in, std::vector<FragmentRef>* fragments);
  std::optional<LeasedPages> ReadLease(LeaseId lease, const TileRange& range) const;
  bool Release(LeaseId lease);
  // One access used these pages, in prefix order. Apart from Lease, so that a reader does not wait
  // for what a policy makes of it.
  void Touch(const KeyspaceId& keyspace, std::span<const PageKey> keys);

  std::span<const std::byte> Bytes(const FragmentRef& fragment) const;

  uint32_t Pin(const KeyspaceId& keyspace, std::span<const PageKey> keys, TimePoint until);
  // Returns the keys that were there.
  std::vector<PageKey> Remove(const KeyspaceId& keyspace, std::span<const PageKey> keys);
  std::vector<PageKey> Drop(const KeyspaceId& keyspace, uint64_t generation);
  void ForEachPage(const KeyspaceId& keyspace,
                   const std::function<void(const PageKey&)>& visit) const;

  PageWalk BeginWalk() const { return {.begun = clock_.Now()}; }
  // Marks fragments of the walk's next pages that the tier below lacks as queued and refers to
  // each; of `pages_max` pages at most. With `only_hit`, those of pages that were read since they
  // came.
  std::vector<Departure> RefAbsentBelow(size_t pages_max, bool only_hit, PageWalk* walk);
  // Adds the walk's next pages that the tier below lacks to `counts`.
  void CountNotBelow(bool only_hit, PageWalk* walk, NotBelowCounts* counts) const;
  // Does what the first overload does, for these pages; their writers are owed durability from
  // then on.
  std::vector<Departure> RefAbsentBelow(const KeyspaceId& keyspace, std::span<const PageKey> keys);
  // As LossLedger has them.
  uint64_t lost_pages() const {
    MutexLock lock(&mutex_);
    return losses_.total();
  }
  uint64_t LossMark(const FlushScope& scope) const {
    MutexLock lock(&mutex_);
    return losses_.Mark(scope);
  }
  LossLedger::Report ReportLosses(const FlushScope& scope, std::optional<uint64_t> since) {
    MutexLock lock(&mutex_);
    return losses_.ReportSince(scope, since);
  }
  std::vector<KeyspaceId> KeyspacesOf(const std::string& tenant) const {
    MutexLock lock(&mutex_);
    return losses_.KeyspacesOf(tenant);
  }
  // The slot's bytes while the page is resident, empty when it was removed.
  std::span<const std::byte> View(const Departure& departure) const;
  // Ends a departure. True when it ended kStored and with it the whole page is below.
  bool Return(const Departure& departure, Below below);
  // The tier below lost the page.
  void ForgetBelow(const KeyspaceId& keyspace, const PageKey& key);

  std::vector<Slab> slabs() const;
  // Once all memory is taken; Stats tells how much is there.
  uint64_t capacity_bytes() const { return memory_->total_bytes(); }

  // Serves the pages of a process before from the slabs they are in, which hold at most
  // host.bytes_max. `below` tells how each stands with the tier below, none: leave it out. Pages
  // that are left out though the tier below lacks them are lost. Call once, before others see the
  // tier, whose slabs are of the image's size.
  Adopted Adopt(HandedOverMemory memory,
                const std::function<std::optional<Below>(const FragmentMeta&)>& below);

  // Takes up to `bytes` more of the memory that Open left, moves pages out of adopted slabs as far
  // as there is room, and gives empty ones up. Returns how many bytes are missing or to be moved
  // then. Own and adopted slabs together, and those that other processes keep though they were
  // given up, take at most one slab more than host.bytes_max. If the system does not give that
  // slab, the pages of one adopted slab are evicted after a while to make room for it. No second
  // slab is evicted before as much memory was obtained as was given up. kResourceExhausted: the
  // memory is not there. Blocks meanwhile.
  absl::StatusOr<uint64_t> Grow(uint64_t bytes);

  // Returns what a successor process needs. Nothing may be written here from now on.
  absl::StatusOr<HandedOverMemory> HandOver();
  TierStats Stats() const;
  // Fills the fields on leases and slabs.
  void AddLeaseStats(StoreStats& stats) const;

 private:
  // Keys or pages that are looked up, referred to or leased before the lock is let go: some 30 us
  // when they are in the processor's cache, 500 us when none is. Each further hold costs a reader
  // up to two switches of threads while others wait for the lock, so a long prompt fits into one.
  static constexpr size_t kPagesPerHold = 2048;
  // Pages that are removed before the lock is let go: some 100 us.
  static constexpr size_t kRemovalsPerHold = 512;
  // Calls `work` with one part after the other of `all`, each of at most `most`.
  template <typename T, typename Work>
  static void InPieces(std::span<const T> all, size_t most, Work work) {
    for (size_t begin = 0; begin < all.size(); begin += most) {
      work(all.subspan(begin, std::min(most, all.size() - begin)));
    }
  }

  struct LeaseRecord {
    std::vector<PageHandle> pages;
    size_t fragments = 0;
    TimePoint since;
  };

  HostTier(const Options& options, std::unique_ptr<SlabMemory> memory,
           std::unique_ptr<EvictionPolicy> policy, const Clock& clock, FragmentTierEvents events);

  std::byte* Data(uint32_t slab) const {
    return inherited_.Holds(slab) ? inherited_.data(slab) : memory_->data(slab);
  }
  // Takes a page of an image in, or nothing of it.
  bool AdoptPage(const HostImage::Page& page, std::span<const uint32_t> regions,
                 const std::function<std::optional<Below>(const FragmentMeta&)>& below)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Counts a page of an image that was left out as lost, if the tier below was to have it.
  void CountLeftOut(const HostImage::Page& page,
                    const std::function<std::optional<Below>(const FragmentMeta&)>& below)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Takes the pages of an image in whose slabs were mapped, and counts those that it left out.
  Adopted AdoptPages(const HostImage& image, std::span<const uint32_t> regions,
                     const std::function<std::optional<Below>(const FragmentMeta&)>& below)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Makes the page's keyspace one of the tenant whose slabs it lies in. False: that cannot be.
  bool AdoptTenant(const HostImage::Page& page, std::span<const uint32_t> regions)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Returns the share of each slab of an image.
  absl::StatusOr<std::vector<uint32_t>> SharesOf(const HostImage& image)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status TakeMemory(uint64_t bytes) ABSL_EXCLUSIVE_LOCKS_REQUIRED(growing_);
  void RenewSlabs() ABSL_EXCLUSIVE_LOCKS_REQUIRED(growing_);
  enum class Move { kMoved, kInUse, kNoRoom, kGone };
  Move MovePage(PageHandle page, uint32_t region);
  void EvictForRoom(PageHandle page);
  // Whether other processes may have the memory of a slab without pages, so that the next process
  // has to know of it.
  bool MayBeKept(uint32_t region) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void CountRevoked(uint32_t slab) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // The tenant of a share, which may be none: "".
  std::string TenantOfShare(uint32_t share) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Gives back the memory of slabs that were given up and that no process has any of.
  void DropLeaving();
  bool GiveUpIfEmpty(uint32_t region) ABSL_EXCLUSIVE_LOCKS_REQUIRED(growing_);
  // Host memory that a call may still hand to the tier below, and what it handed.
  struct Demotion {
    TimePoint now;
    uint64_t bytes_max = 0;
    std::vector<Departure>* departures = nullptr;
  };
  // A slab belongs to one share of the table, or is on its way to another:
  //
  //   kOwned --CloseRegion--> kClosing --its last page left--> kGone --UnusedSlab--> kRenewing
  //      ^--------------------------------Give-------------------------------------------'
  //
  // kGone and kRenewing alternate until MakeFresh succeeds.
  struct SlabState {
    enum class Phase : uint8_t {
      kOwned,
      kClosing,   // takes no more pages; those in it leave
      kGone,      // given up; processes that mapped it may still do so
      kRenewing,  // one thread replaces its file, without the lock
    };
    Phase phase = Phase::kOwned;
    uint32_t share = 0;    // the last one, when it was given up
    bool written = false;  // since its file was made
    bool dropped = false;  // its file was given back, and there is no fresh one yet
    bool pinned = false;   // pages of it were, when it was looked at last
    uint32_t files = 0;    // that it had before the present one
    uint64_t bytes = 0;
    uint64_t free_before = 0;  // free memory before its file was given back
    TimePoint since = {};      // when it came to its phase
    TimePoint retry = {};      // when it may be looked at again
  };
  // Counts of slabs by share, of its own and of those that its processes keep, and the part that
  // each share may have.
  struct Parts {
    std::map<uint32_t, size_t> owned;
    std::map<uint32_t, size_t> kept;
    size_t part = 0;
  };

  std::optional<Slot> Allocate(uint64_t bytes, uint32_t share)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // A search for room, which goes on over several holds of the lock.
  struct Search {
    uint64_t bytes = 0;
    uint32_t share = 0;
    std::optional<Slot> slot = {};
    size_t steps = 0;    // pages looked at since the last one that was evicted
    bool ended = false;  // there is no page that may go, or none was found among many
    bool goes_on() const { return !slot && !ended; }
  };
  // Evicts pages until there is room, the search ends, or the lock was held long enough.
  void EvictFor(Search& search, Demotion& demotion) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Takes a page out, or hands it to the tier below first. False: it stays for that.
  bool Evict(PageHandle page, Demotion& demotion) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool EvictOne(Search& search, Demotion& demotion) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  // 0 for no tenant; `policy` is for a new share.
  uint32_t ShareOfTenant(const std::string& tenant, std::unique_ptr<EvictionPolicy> policy)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Gives the page's share a slab without owner or another's without pages. False: there is none.
  bool TakeIdleSlab(PageHandle page);
  // A slot for a share whose slabs are full: in a slab that another share gave up or must give up,
  // else in place of pages of its own.
  std::optional<Slot> AllocateFromOthers(uint64_t bytes, uint32_t share, Demotion& demotion);
  // A slab that was given up and is not in `tried`, for MakeFresh; adds the numbers of slabs that
  // were given up to `gone`. None: there is none now, but another share may be giving one up; with
  // *more set it has pages that are to be evicted first: call again, and let others have the lock
  // between.
  std::optional<uint32_t> TakeSlab(uint32_t share, Demotion& demotion,
                                   std::span<const uint32_t> tried, std::vector<uint32_t>* gone,
                                   bool* more) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  std::optional<uint32_t> UnusedSlab(std::span<const uint32_t> tried, TimePoint now)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  Parts CountParts(uint32_t share) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Counts the slabs without pages that `share` could take.
  size_t IdleSlabs(uint32_t share) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Whether a slab was given up so lately that processes may let it go yet: no other is taken from
  // its tenant meanwhile.
  bool Settling(TimePoint now) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // The slab that another share must give up for this one; none: this one has its part.
  std::optional<uint32_t> SlabToClose(uint32_t share, TimePoint now)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void GiveUp(uint32_t slab, TimePoint now, std::vector<uint32_t>* gone)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Evicts pages of closing slabs. True: it stopped at its bound, before the last one.
  bool EmptyClosing(Demotion& demotion, std::vector<uint32_t>* gone)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Takes one slab without pages from another share. False: there is none.
  bool GiveUpIdle(uint32_t share, TimePoint now, std::vector<uint32_t>* gone)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void TellGone(std::span<const uint32_t> gone) const;
  // Replaces the file of a slab in kRenewing by a fresh one. False: processes keep the old one, or
  // its memory has not come back; the slab is in kGone again.
  bool MakeFresh(uint32_t slab);
  bool DropFile(uint32_t slab);
  bool MayRevoke(uint32_t slab);
  // Makes a slab that is fresh the share's and allocates in it.
  std::optional<Slot> Give(uint32_t slab, uint32_t share, uint64_t bytes);
  // The number that readers know a slab by. It is another one for each file that the slab has, so
  // that a reader which has not heard of a move cannot take the old file for the new one.
  uint32_t NumberOf(uint32_t region) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return region < slabs_.size() ? region + slabs_[region].files * numbers_ : region;
  }
  uint32_t RegionOf(uint32_t number) const { return number & (numbers_ - 1); }
  // Adds the fragments of a page that a lease takes in. False: they would be too many.
  bool AddLeased(PageHandle handle, size_t index, Tier found_in, const AcquireRequest& request,
                 std::vector<FragmentRef>* fragments) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Adds the fragments of page `index` of a request that intersect `range`.
  void AddRefs(const Page& page, size_t index, const TileRange& range,
               std::vector<FragmentRef>* fragments) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void EmptyChunkFor(uint64_t bytes, uint32_t share, TimePoint now)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  uint64_t BytesAbsentBelow(const Page& page) const;
  void Depart(PageHandle page, std::vector<Departure>* departures)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Announce(const std::vector<PageTable::Change>& changes) const;

  const Options options_;
  const std::unique_ptr<SlabMemory> memory_;
  InheritedSlabs inherited_;  // changed with mutex_ held
  uint32_t numbers_ = 1;      // power of two above all regions; fixed once others see the tier

  Mutex growing_;                                 // one Grow at a time
  TimePoint progress_ ABSL_GUARDED_BY(growing_);  // when a page moved or a slab was given up
  uint64_t given_up_bytes_ ABSL_GUARDED_BY(growing_) = 0;
  const Clock& clock_;
  const FragmentTierEvents events_;

  mutable Mutex mutex_;
  LossLedger losses_ ABSL_GUARDED_BY(mutex_);
  PageTable table_ ABSL_GUARDED_BY(mutex_);
  absl::flat_hash_map<std::string, uint32_t> share_of_tenant_ ABSL_GUARDED_BY(mutex_);
  std::vector<SlabState> slabs_ ABSL_GUARDED_BY(mutex_);
  std::vector<TimePoint> share_used_ ABSL_GUARDED_BY(mutex_);
  uint64_t slab_moves_ ABSL_GUARDED_BY(mutex_) = 0;
  size_t next_gone_ ABSL_GUARDED_BY(mutex_) = 0;  // where UnusedSlab begins
  uint64_t revoked_ ABSL_GUARDED_BY(mutex_) = 0;
  std::map<std::string, uint64_t> revoked_of_ ABSL_GUARDED_BY(mutex_);  // by tenant
  uint64_t renewals_failed_ ABSL_GUARDED_BY(mutex_) = 0;
  // When a slab that was found pinned may be looked at again, and how often one was.
  TimePoint pinned_retry_ ABSL_GUARDED_BY(mutex_) = TimePoint::min();
  uint64_t pinned_checks_ ABSL_GUARDED_BY(mutex_) = 0;
  std::map<LeaseId, LeaseRecord> leases_ ABSL_GUARDED_BY(mutex_);  // the oldest first
  LeaseId last_lease_ ABSL_GUARDED_BY(mutex_) = 0;
  size_t leased_fragments_ ABSL_GUARDED_BY(mutex_) = 0;
};

// Returns how many slabs' memory a tier must leave, because it reads `held` slabs of the process
// before it, other processes keep `kept` slabs that no tier uses any more, and may have pinned
// pages of `revoked` slabs. One slab and HostOptions::revoked_slabs_max revoked ones may be there
// beside bytes_max.
uint64_t SlabsBeside(uint64_t held, uint64_t kept, uint64_t revoked, const HostOptions& options);

// Fits options to memory that is to be adopted: the size of slabs, and what may be taken beside it.
void LimitToHandedOver(const HandedOverMemory& memory, HostTier::Options* options);

}  // namespace crumb::storage
