// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "absl/functional/function_ref.h"
#include "common/clock.h"
#include "storage/index/page_entries.h"
#include "storage/index/page_forest.h"
#include "storage/policy/chunked_vector.h"
#include "storage/policy/policy.h"

namespace crumb::storage {

// The order in which the pages of one tier are evicted: an EvictionPolicy for each tenant
// partition, and the chains of pages, which the policies do not keep. A PageTable owns it and adds
// and removes pages; tiers report uses and search for victims through PageTable::order().
//
// Parents. A page names its parent, which may be absent, arrive later, or be wrong: writers choose
// the names. Each page that is resident, or that resident pages name as their parent, has a place
// in a forest; a place outlives its page while it has children. A page that arrives takes the place
// of its key, with the children there, and is linked below its parent's place unless that is in the
// same tree already: that link would close a ring, and the page counts as one without a parent. So
// there are no rings and always a leaf to evict, and no call walks along a chain of pages or over
// the children of one.
//
// Every call costs O(log n) for each page, whatever else the tier holds; searches for a victim are
// bounded by their `steps`. Not thread-safe: the tier's lock covers it.
class EvictionOrder {
 public:
  // Pages that a search for a victim looks at before it gives up: some 3 ms. Only if so many in a
  // row are referred to or pinned does it end without having seen all.
  static constexpr size_t kVictimStepsMax = 65'536;

  // `policy` orders partition 0, which has the keyspaces that are in no other. `pages` must outlive
  // this.
  EvictionOrder(std::unique_ptr<EvictionPolicy> policy, PageEntries& pages);

  // Adds a tenant partition: keyspaces whose pages lie in regions of their own and are evicted in
  // an order of their own. Returns its number.
  uint32_t AddPartition(std::unique_ptr<EvictionPolicy> policy);
  uint32_t partitions() const { return static_cast<uint32_t>(partitions_.size()); }

  // Opens an access: the calls of Hit and the pages that are added until the next one belong to it.
  void BeginAccess(uint32_t partition = 0) { partitions_[partition].policy->BeginAccess(); }
  // The present access read the page.
  void Hit(PageHandle page);

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

  // Returns the cost of keeping the chains of pages so far, in steps of a few memory accesses.
  uint64_t chain_steps() const { return forest_.steps(); }

 private:
  friend class PageTable;

  // Children of a page that one ParentLeftBy examines at most; it runs for each evicted page with
  // the tier's lock held.
  static constexpr size_t kSiblingsMax = 64;

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

  // Gives a page its place in the forest and in its partition's policy. REQUIRES: it is resident
  // and has none.
  void Add(PageHandle page);
  // Takes them from it; its children keep the place, because their parent may come back.
  void Remove(PageHandle page, Removal removal);

  // Returns the nearest page above `from` that `is_free` accepts. Moves `from` along; it is kNoPage
  // behind the beginning of the chain.
  std::optional<PageHandle> FreeAncestor(absl::FunctionRef<bool(const Page&)> is_free,
                                         PageHandle& from, size_t& steps) const;
  ForestHandle NewPlace();
  // Returns the place of the page's key, with the children that wait there.
  ForestHandle TakePlace(const Page& page);
  // Returns the place that a page at `place` is to hang below; kNoForestNode: none, or it would
  // close a ring.
  ForestHandle ParentPlace(const Page& page, ForestHandle place);
  void LinkPlace(ForestHandle place, ForestHandle parent);
  void UnlinkPlace(ForestHandle place);
  void LeavePlace(const Page& page);
  void NoteChildren(ForestHandle place, bool has_children);

  PageEntries& pages_;
  std::vector<TenantPartition> partitions_;
  PageForest forest_;
  ChunkedVector<Place> places_;  // indexed by ForestHandle
};

}  // namespace crumb::storage
