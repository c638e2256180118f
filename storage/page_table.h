// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/container/inlined_vector.h"
#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "common/clock.h"
#include "common/metrics.h"
#include "storage/fragment_tier.h"
#include "storage/held_bytes.h"
#include "storage/inherited_slabs.h"
#include "storage/key_index.h"
#include "storage/loss_ledger.h"
#include "storage/page_forest.h"
#include "storage/policy/chunked_vector.h"
#include "storage/policy/policy.h"
#include "storage/slot_allocator.h"

namespace crumb::storage {

// Names a page of a PageTable, from Insert until it is removed and has no references.
using PageHandle = uint32_t;
inline constexpr PageHandle kNoPage = UINT32_MAX;

enum class RemovalReason { kCapacity, kDeleted, kCorrupt };

// The state, in the tier below, of a fragment in host memory:
//   kAbsent -> kQueued   the fragment is queued for writing
//   kQueued -> kStored   the write is durable
//   kQueued -> kAbsent   the write failed, or the queue had no room left
//   kQueued -> kRefused  the tier below refused the fragment for good: its size, its generation
//   kStored -> kAbsent   the tier below evicted or lost the page
enum class Below : uint8_t {
  kAbsent,   // the tier below does not have the fragment
  kQueued,   // the fragment waits to be written, and the queue refers to its page
  kStored,   // the fragment is durable
  kRefused,  // the tier below can never store the fragment, or does not exist
};

struct Fragment {
  TileRange range;
  uint32_t tiles_bytes = 0;
  uint32_t bytes = 0;
  uint32_t logical_tile_bytes = 0;
  Below below = Below::kAbsent;
  // True if a writer was promised that the fragment would be durable, and it has not been since.
  bool owed = false;
  // True if the fragment is queued and a writer was promised this after it had been queued.
  bool owed_again = false;
  Slot slot;
};

struct PageSpace;

struct Page {
  KeyspaceId keyspace;
  PageKey key;
  PageKey parent;
  uint64_t generation = 0;
  absl::InlinedVector<Fragment, 1> fragments;
  uint32_t references = 0;
  uint32_t holds = 0;          // references of leases and reads
  PageSpace* space = nullptr;  // the state of the page's keyspace
  uint64_t slots_bytes = 0;    // sum over the slots of its fragments
  uint32_t partition = 0;      // index of the partition whose policy orders it
  bool resident = false;       // false: removed, kept while it is referenced
  bool was_hit = false;
  bool recency_dirty = false;
  bool pinned = false;  // its bytes are held by a pin, which may have expired
  ItemHandle item = kNoItem;
  ForestHandle place = kNoForestNode;  // valid only if `resident`
  uint64_t access = 0;                 // the tier's own count of accesses when it was last used
  TimePoint added;
  TimePoint used;
  TimePoint pinned_until;

  bool Covers(const TileRange& range) const;
};

// The state of one keyspace in a PageTable.
struct PageSpace {
  uint32_t partition = 0;
  uint64_t generation = 0;
  uint64_t bytes = 0;  // sum over fragments whose slots are not free yet
  HeldBytes::Account held;
  KeyIndex pages;
  KeyIndex vacant;  // places of absent pages that have children
};

// The index of one tier: which fragments of which pages are in which slots, who refers to them, and
// which order they are evicted. A page is the unit of eviction: without one of its fragments the
// others are useless. The slots of a removed page are freed with its last reference. The table does
// no I/O. It is not thread-safe: the tier's lock covers it.
//
// Held bytes. All slots of a page that has holds or a pin count towards the held bytes of its
// keyspace's tenant, each page once, and a removed page until its last hold ends. If a pinned page
// has more bytes in the tier below than here, the difference counts too, because the pin keeps them
// there. Nothing is counted before BoundHeldBytes is called.
//
// Parents. A page names its parent, which may be absent, arrive later, or be wrong: writers choose
// the names. Each page that is resident, or that resident pages name as their parent, has a place
// in a forest; a place outlives its page while it has children. A page that arrives takes the place
// of its key, with the children there, and is linked below its parent's place unless that is in the
// same tree already: that link would close a ring, and the page counts as one without a parent. So
// there are no rings and always a leaf to evict, and no call walks along a chain of pages or over
// the children of one.
//
// Cost. A call costs O(log n) for each key, page or fragment that it is given or returns, whatever
// else the table holds, except for ForEachPage and PagesOlderThan, which walk.
class PageTable {
 public:
  // Pages that a search for a victim looks at before it gives up: some 3 ms. Only if so many in a
  // row are referred to or pinned does it end without having seen all.
  static constexpr size_t kVictimStepsMax = 65'536;

  // `inherited` has the slots of its regions. `losses` counts pages that leave for room before all
  // their fragments were stored below, though that was owed. Both may be null and outlive this.
  PageTable(std::unique_ptr<EvictionPolicy> policy, const SlotAllocator::Rounding& rounding,
            InheritedSlabs* inherited = nullptr, LossLedger* losses = nullptr);
  // Over slots from elsewhere, which outlive this; slots() is not to be called.
  PageTable(std::unique_ptr<EvictionPolicy> policy, SlotSpace& space);

  // Adds a tenant partition: keyspaces whose pages lie in regions of their own and leave in an
  // order of their own. Partition 0 is there from the start and has every keyspace that is in no
  // other.
  uint32_t AddPartition(std::unique_ptr<EvictionPolicy> policy);
  uint32_t partitions() const { return static_cast<uint32_t>(partitions_.size()); }
  // Must have no resident pages.
  void SetPartition(const KeyspaceId& keyspace, uint32_t partition);
  uint32_t PartitionOf(const KeyspaceId& keyspace) const;

  // Insert refuses more fragments than this of one page. No bound at first.
  void SetPageFragmentsMax(size_t most) { page_fragments_max_ = most; }

  SlotAllocator& slots() { return *allocator_; }
  const SlotAllocator& slots() const { return *allocator_; }
  Page& operator[](PageHandle page) { return pages_[page]; }
  const Page& operator[](PageHandle page) const { return pages_[page]; }

  PageHandle Find(const KeyspaceId& keyspace, const PageKey& key) const;
  // Limits each tenant to part_max_percent of those of the `total` bytes that other tenants do not
  // hold. REQUIRES: no page was inserted yet.
  void BoundHeldBytes(uint64_t total, int64_t part_max_percent) {
    held_.SetBound(total, part_max_percent);
  }
  uint64_t held_bytes() const { return held_.used(); }
  // The bytes that the keyspace keeps count for this tenant.
  void SetTenant(const KeyspaceId& keyspace, const std::string& tenant);
  // The keyspace has ended.
  void ForgetTenant(const KeyspaceId& keyspace);

  // Finds keys in order until `visit`, called with index and handle or kNoPage, returns false.
  // `visit` may refer to pages, but must not add or remove any.
  void FindEach(const KeyspaceId& keyspace, std::span<const PageKey> keys,
                absl::FunctionRef<bool(size_t, PageHandle)> visit) const;

  // Looks up many pages of one keyspace; valid until the table is changed.
  class View;
  View ViewOf(const KeyspaceId& keyspace) const;

  // Adds a fragment that lies in `slot`. An older generation of the page is removed.
  // kAlreadyExists: the table has some of its tiles; kAborted: its generation was dropped or is
  // older than the page's; kResourceExhausted: the page has as many fragments as it may have. On
  // error the caller still owns the slot.
  absl::StatusOr<PageHandle> Insert(const FragmentMeta& meta, const Slot& slot, Below below,
                                    bool owed, TimePoint now);
  // Whether the tenant may keep the fragment, if its page is held. Insert does not check this.
  bool MayInsert(const FragmentMeta& meta, const Slot& slot, Below below) const;
  // Whether Insert would take it, with Insert's errors.
  absl::Status CanInsert(const FragmentMeta& meta) const;

  // The fragment's bytes are in `slot` from now on; its former slot is free.
  void MoveFragment(PageHandle page, const TileRange& range, const Slot& slot);
  // Whether a fragment of the page lies in a slot that can be used again.
  bool HasOwnSlot(const Page& page) const;

  void Remove(PageHandle page, RemovalReason reason, TimePoint now);
  void Ref(PageHandle page) {
    ++pages_[page].references;
    ++references_;
  }
  void Unref(PageHandle page);
  // Refers to a page for a lease or a read. Returns false, and does not, if it is `bounded` and the
  // tenant would keep more than its part.
  bool Hold(PageHandle handle, bool bounded) {
    Page& page = pages_[handle];
    if (!IsHeld(page) && held_.bounded()) {
      if (bounded && !held_.Fits(page.space->held, page.slots_bytes)) return false;
      held_.Add(page.space->held, page.slots_bytes);
    }
    ++page.holds;
    Ref(handle);
    return true;
  }
  void Unhold(PageHandle handle) {
    Page& page = pages_[handle];
    --page.holds;
    if (!IsHeld(page)) held_.Give(page.space->held, page.slots_bytes);
    Unref(handle);
  }

  // Pins a page that is here, or in the tier below, where it has below_bytes, until then. Returns
  // false, and does not, if the tenant would keep more than its part.
  bool Pin(const KeyspaceId& keyspace, const PageKey& key, uint64_t below_bytes, TimePoint until);
  void Unpin(const KeyspaceId& keyspace, const PageKey& key);
  // The tier below has the page no more.
  void ForgetBelow(const KeyspaceId& keyspace, const PageKey& key);
  // Subtracts up to `count` expired pins from the held bytes of their tenants. Returns how many.
  size_t ExpirePins(TimePoint now, size_t count);
  // References to all pages, removed ones included. While it is not 0 some handle is in use, and
  // the table must not be destroyed.
  uint64_t references() const { return references_; }

  void BeginAccess(uint32_t partition = 0) { partitions_[partition].policy->BeginAccess(); }
  // The present access read the page: for the policy.
  void Hit(PageHandle page);

  // Notes that pages were read now: for the statistics.
  void NoteRead(std::span<const PageHandle> pages, TimePoint now);
  // Returns the next page of the partition to evict among those without references and pins that
  // `may_go` accepts. Examines at most `steps` pages and subtracts their number from it; if `steps`
  // reaches 0, pages may be left that the next call examines.
  std::optional<PageHandle> Victim(TimePoint now, absl::FunctionRef<bool(const Page&)> may_go,
                                   uint32_t partition, size_t& steps);
  // Calls the overload above with kVictimStepsMax steps, which suffice unless nearly all pages are
  // pinned.
  std::optional<PageHandle> Victim(TimePoint now, absl::FunctionRef<bool(const Page&)> may_go,
                                   uint32_t partition = 0) {
    size_t steps = kVictimStepsMax;
    return Victim(now, may_go, partition, steps);
  }

  // Returns a page like Victim's, but one that has children. For when all pages without children
  // are in use: a chain of which the last page waits to be written to the tier below must not keep
  // all others. Walks from such pages towards the beginnings of their chains and returns the first
  // page on the way that may go. Examines at most `steps` pages and subtracts their number; if
  // `steps` reaches 0, the next call goes on from `from`, which is kNoPage at first.
  std::optional<PageHandle> InnerVictim(TimePoint now, absl::FunctionRef<bool(const Page&)> may_go,
                                        uint32_t partition, PageHandle& from, size_t& steps);

  // Returns the parent of the page if `leaving` accepts every child of that parent. The parent may
  // be evicted together with them, though its policy still counts children. Returns none also if it
  // has more than kSiblingsMax children.
  std::optional<PageHandle> ParentLeftBy(PageHandle page,
                                         absl::FunctionRef<bool(PageHandle)> leaving) const;

  // Up to `limit` pages of a keyspace with a generation below `generation`.
  std::vector<PageHandle> PagesOlderThan(const KeyspaceId& keyspace, uint64_t generation,
                                         size_t limit = SIZE_MAX) const;
  void ForEachPage(const KeyspaceId& keyspace, absl::FunctionRef<void(const Page&)> visit) const;
  // Visits pages of a keyspace in pieces between which the tier may let its lock go: looks at up to
  // `count` pages of the table from `from` on, 0 at first, and returns where the next piece begins,
  // kNoPage behind the last. Sees every page once that is there from the first piece to the last.
  // `visit` must not change the table.
  PageHandle Scan(const KeyspaceId& keyspace, PageHandle from, size_t count,
                  absl::FunctionRef<void(PageHandle, const Page&)> visit) const;
  void ForEachPage(absl::FunctionRef<void(PageHandle, const Page&)> visit) const;

  void RaiseGeneration(const KeyspaceId& keyspace, uint64_t generation);
  uint64_t GenerationOf(const KeyspaceId& keyspace) const;
  // Those that RaiseGeneration set.
  std::vector<std::pair<KeyspaceId, uint64_t>> Generations() const;

  // Pages that came and went since the last call: first fragment in, last one out.
  struct Change {
    KeyspaceId keyspace;
    PageKey key;
    bool added = false;
  };
  std::vector<Change> TakeChanges();

  // Returns the bytes of fragments, tiles and headers, those of removed pages that are still
  // referred to included.
  uint64_t BytesOf(const KeyspaceId& keyspace) const;
  uint64_t pages() const { return stats_.pages; }  // resident ones
  // Returns how many fragments the resident pages have together.
  uint64_t fragments() const { return fragments_; }
  // Resident pages of the keyspace.
  uint64_t PagesOf(const KeyspaceId& keyspace) const;

  // Handles that were ever used: each page has a lower one as long as it is here.
  PageHandle handles_end() const { return static_cast<PageHandle>(pages_.size()); }

  void CountPut(const FragmentMeta& meta);
  void CountGet(const FragmentMeta& meta);
  void CountGet(const Fragment& fragment) {
    stats_.logical_get_bytes +=
        static_cast<uint64_t>(fragment.range.tiles()) * fragment.logical_tile_bytes;
    stats_.stored_get_bytes += fragment.bytes;
  }
  TierStats Stats() const;
  FragmentMeta MetaOf(const Page& page, const Fragment& fragment) const;

  // Returns the cost of keeping the chains of pages so far, in steps of a few memory accesses.
  uint64_t chain_steps() const { return forest_.steps(); }

 private:
  // Children of a page that one ParentLeftBy examines at most; it runs for each evicted page with
  // the tier's lock held.
  static constexpr size_t kSiblingsMax = 64;

  using Space = PageSpace;
  using PageName = std::pair<KeyspaceId, PageKey>;
  struct HeldPin {
    TimePoint until;
    uint64_t bytes = 0;  // the page's bytes in the tier below minus those in this table
    Space* space = nullptr;
  };
  using Pins = std::map<PageName, HeldPin>;

  // The place of a page, or of an absent page that resident ones name as their parent.
  struct Place {
    PageHandle page = kNoPage;
    ForestHandle parent = kNoForestNode;  // the linked parent; not set if the link would be a ring
    ForestHandle first_child = kNoForestNode;
    ForestHandle next_sibling = kNoForestNode;
    ForestHandle previous_sibling = kNoForestNode;
  };

  struct TenantPartition {
    std::unique_ptr<EvictionPolicy> policy;
    ChunkedVector<PageHandle> page_of_item;  // indexed by the policy's ItemHandle
  };

  // Returns the nearest page above `from` that `is_free` accepts. Moves `from` along; it is kNoPage
  // behind the beginning of the chain.
  std::optional<PageHandle> FreeAncestor(absl::FunctionRef<bool(const Page&)> is_free,
                                         PageHandle& from, size_t& steps) const;

  bool IsInherited(const Slot& slot) const {
    return inherited_ != nullptr && inherited_->Holds(slot.region);
  }
  static bool IsHeld(const Page& page) { return page.holds > 0 || page.pinned; }
  // Whether a fragment that is new makes a pinned page grow in the tier below, where its pin is.
  bool GrowsBelow(const FragmentMeta& meta, const Page* page, Below below) const;
  void NoteInserted(Page& page, const FragmentMeta& meta, const Slot& slot, Below below);
  void ErasePin(Pins::iterator pin);
  void ForgetPin(Page& page);
  // The pinned page leaves: its pin is one of the tier below, or ends.
  void LeavePin(Page& page);
  void SetSlotOwner(const Slot& slot, PageHandle page);
  void FreeSlot(const Slot& slot);
  Space* SpaceOf(const KeyspaceId& keyspace) const;
  Space& MakeSpace(const KeyspaceId& keyspace);
  PageHandle AddPage(Space& space, const FragmentMeta& meta, TimePoint now);
  ForestHandle NewPlace();
  // The place of the page's key, with the children that wait there.
  ForestHandle TakePlace(Space& space, const PageKey& key);
  // The place that a page at `place` is to hang below; kNoForestNode: none, or it would close a
  // ring.
  ForestHandle ParentPlace(Space& space, const FragmentMeta& meta, ForestHandle place);
  void LinkPlace(ForestHandle place, ForestHandle parent);
  void UnlinkPlace(ForestHandle place);
  void LeavePlace(Space& space, const Page& page);
  void NoteChildren(ForestHandle place, bool has_children);
  void FreeSlots(PageHandle page);
  void CountRemoval(const Page& page, RemovalReason reason, TimePoint now);

  std::vector<TenantPartition> partitions_;
  const std::unique_ptr<SlotAllocator> allocator_;  // null: slots from elsewhere
  SlotSpace& slots_;
  InheritedSlabs* const inherited_;
  LossLedger* const losses_;
  absl::flat_hash_map<KeyspaceId, std::unique_ptr<Space>> spaces_;
  HeldBytes held_;
  Pins pins_;
  std::set<std::pair<TimePoint, PageName>> pin_ends_;
  ChunkedVector<Page> pages_;
  uint64_t references_ = 0;
  std::vector<PageHandle> free_pages_;
  PageForest forest_;
  ChunkedVector<Place> places_;  // indexed by ForestHandle
  size_t page_fragments_max_ = SIZE_MAX;
  uint64_t fragments_ = 0;  // number of fragments of resident pages
  std::vector<Change> changes_;
  TierStats stats_;  // event counters; Stats() adds the gauges that it computes
  Histogram lifetime_seconds_;
  HistogramSnapshot reuse_seconds_;
};

class PageTable::View {
 public:
  // Whether the keyspace has no page in the table.
  bool empty() const { return space_ == nullptr || space_->pages.size() == 0; }
  PageHandle Find(const PageKey& key) const { return Find(KeyIndex::Hash(key)); }
  PageHandle Find(const KeyIndex::Hashed& key) const {
    static_assert(kNoPage == KeyIndex::kNone);
    return space_ == nullptr ? kNoPage : space_->pages.Find(key);
  }
  // Prefetches the bucket that Find will read.
  void Prefetch(const KeyIndex::Hashed& key) const {
    if (space_ != nullptr) space_->pages.Prefetch(key);
  }
  void Prefetch(const PageKey& key) const { Prefetch(KeyIndex::Hash(key)); }

 private:
  friend class PageTable;
  explicit View(const Space* space) : space_(space) {}
  const Space* space_;
};

// A copy of a histogram's state.
HistogramSnapshot SnapshotOf(const Histogram& histogram);

}  // namespace crumb::storage
