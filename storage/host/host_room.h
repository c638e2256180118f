// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "storage/host/host_state.h"

namespace crumb::storage {

// Finds room for pages in host memory: free slots, slots of pages that it evicts, and slabs that it
// takes from tenants which have more than their part. Also says which tenant's slabs the pages of a
// keyspace lie in. The store owns it, beside HostTier over the same HostState, whose lock it holds
// for pieces of a search: up to a number of evictions, or of pages that it looks at.
//
// Reserve returns a slot without a page. REQUIRES: the caller writes the fragment to Memory(slot)
// and passes the slot to HostTier::Publish, or to Abandon. Thread-safe.
class HostRoom {
 public:
  explicit HostRoom(HostState& state) : state_(state) {}
  HostRoom(const HostRoom&) = delete;

  // Whether so many bytes of a page of this keyspace can be queued for the tier below, beside those
  // for which it was true before. Called with HostState::mutex held.
  using MayDepart = absl::FunctionRef<bool(const KeyspaceId& keyspace, uint64_t bytes)>;

  // Returns a slot for `bytes` in a slab of the keyspace's tenant, not visible yet, evicting pages
  // of that tenant for it, or emptying another's slab where that one has more than its part. Pages
  // that the tier below lacks are kept and returned as departures, to be queued, if they may
  // depart; the others are lost. kResourceExhausted: every slot is in use or referred to;
  // kInvalidArgument: no slab is so large.
  absl::StatusOr<Slot> Reserve(const KeyspaceId& keyspace, uint64_t bytes, MayDepart may_depart,
                               std::vector<Departure>* departures);
  std::span<std::byte> Memory(const Slot& slot) const { return state_.Memory(slot); }
  void Abandon(const Slot& slot);

  // Keeps the keyspace's pages in slabs of this tenant's own from now on; those that are elsewhere
  // leave host memory, and are lost if the tier below lacks them. Keyspaces of no tenant share
  // slabs of theirs. kFailedPrecondition: the slabs cannot change their tenants.
  absl::Status SetTenant(const KeyspaceId& keyspace, const std::string& tenant);
  // A descriptor for reading of a slab that pages of this keyspace lie in, for a process to map.
  // Its file never holds another tenant's pages. kPermissionDenied: the slab is not of the
  // keyspace's tenant, or holds none of its pages.
  absl::StatusOr<UniqueFd> OpenSlab(uint32_t slab, const KeyspaceId& keyspace) const;
  // Gives the page's partition a slab without owner or another's without pages. Returns false if
  // there is none.
  bool TakeIdleSlab(PageHandle page);

 private:
  // The rule by which a call may hand pages to the tier below, and the pages it handed.
  struct Demotion {
    TimePoint now;
    MayDepart may_depart;
    std::vector<Departure>* departures = nullptr;
  };
  // A search for room, which goes on over several holds of the lock.
  struct Search {
    uint64_t bytes = 0;
    uint32_t partition = 0;
    std::optional<Slot> slot = {};
    size_t steps = 0;            // pages looked at since the last one that was evicted
    PageHandle above = kNoPage;  // EvictionOrder::InnerVictim goes on from here
    bool ended = false;          // there is no page that may go, or none was found among many
    bool goes_on() const { return !slot && !ended; }
  };

  // Evicts pages until there is room, the search ends, or the lock was held long enough.
  void EvictFor(Search& search, Demotion& demotion) ABSL_EXCLUSIVE_LOCKS_REQUIRED(state_.mutex);
  bool EvictOne(Search& search, Demotion& demotion) ABSL_EXCLUSIVE_LOCKS_REQUIRED(state_.mutex);
  // Takes a page out, or hands it to the tier below first. Returns false if it stays for that.
  bool Evict(PageHandle page, Demotion& demotion) ABSL_EXCLUSIVE_LOCKS_REQUIRED(state_.mutex);
  void EmptyChunkFor(const Search& search, TimePoint now)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(state_.mutex);
  // A slot for a partition whose slabs are full: in a slab that another partition gave up or must
  // give up, else in place of pages of its own.
  void AllocateFromOthers(Search& search, Demotion& demotion);
  // Takes a slab that was given up and is not in `tried`, for MakeFresh; adds the numbers of slabs
  // that were given up to `gone`. Returns none if no slab may be taken now, though another
  // partition may be giving one up. Sets *more if that one has pages that are to be evicted first:
  // call again, and let others have the lock between.
  std::optional<uint32_t> TakeSlab(uint32_t partition, Demotion& demotion,
                                   std::span<const uint32_t> tried, std::vector<uint32_t>* gone,
                                   bool* more) ABSL_EXCLUSIVE_LOCKS_REQUIRED(state_.mutex);
  // Takes a slab without pages, which was given up before or is given up by another partition now.
  std::optional<uint32_t> TakeIdle(uint32_t partition, TimePoint now,
                                   std::span<const uint32_t> tried, std::vector<uint32_t>* gone)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(state_.mutex);
  // Evicts pages of closing slabs. Returns true if it stopped at its bound, before the last one.
  bool EmptyClosing(Demotion& demotion, std::vector<uint32_t>* gone)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(state_.mutex);
  void ReportGone(std::span<const uint32_t> gone) const;
  // Replaces the file of a slab in kRenewing by a fresh one. Returns false if processes keep the
  // old one, or its memory has not come back; then the slab is in kGone again.
  bool MakeFresh(uint32_t slab);
  bool DropFile(uint32_t slab);

  HostState& state_;
};

}  // namespace crumb::storage
