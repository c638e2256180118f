// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "common/clock.h"
#include "storage/host/inherited_slabs.h"
#include "storage/host/slab_memory.h"
#include "storage/slot_allocator.h"
#include "storage/store_options.h"
#include "storage/store_stats.h"

namespace crumb::storage {

// Records which tenant partition owns each slab of host memory, and moves slabs between partitions:
//
//             CloseOneFor             GiveUp              TakeUnused
//   kOwned ----------------> kClosing -------> kGone <-----------------> kRenewing
//    ^  |    GiveUpIdle: it has no pages         ^        EndRenewal       |
//    |  '----------------------------------------'                         |
//    '--------------------------------- Give ------------------------------'
//
// kGone and kRenewing alternate until the slab has a fresh file, or needs none because it was never
// written to. Not thread-safe: HostState::mutex covers it.
class SlabOwners {
 public:
  // Time between two checks of slabs with pinned pages. A check of one of crumbd's own slabs takes
  // a writer thread up to 200 ms in the kernel, and a tenant can pin a page of each of its slabs;
  // 4 s limit the checks to 5 % of the thread's time.
  static constexpr Duration kPinnedRetry = std::chrono::seconds(4);

  struct Slab {
    enum class Phase : uint8_t {
      kOwned,
      kClosing,   // receives no more pages, and its pages are evicted or moved
      kGone,      // given up, but processes may still map it
      kRenewing,  // one thread replaces its file without holding the lock
    };
    Phase phase = Phase::kOwned;
    uint32_t partition = 0;  // its owner; in kGone and kRenewing the last owner
    bool written = false;    // pages were written to its present file
    bool dropped = false;    // its file was freed, and it has no new one yet
    bool pinned = false;     // the last check found pinned pages in it
    uint32_t given = 0;      // how often it was given to a partition
    uint64_t bytes = 0;
    uint64_t free_before = 0;  // free memory of the system before its file was freed
    TimePoint since = {};      // time at which it entered its phase
    TimePoint retry = {};      // time of its next check
    // Bytes at the beginning of a kClosing slab whose pages were examined already.
    uint64_t looked_at = 0;

    bool InTable() const { return phase == Phase::kOwned || phase == Phase::kClosing; }
  };

  // Adds the slabs of `memory` to `slots`, as regions of partition 0. The arguments outlive this.
  SlabOwners(const SlabMemory& memory, const HostOptions& options, SlotAllocator& slots,
             const InheritedSlabs& inherited, TimePoint now);

  size_t size() const { return slabs_.size(); }
  const Slab& operator[](size_t slab) const { return slabs_[slab]; }

  // Returns the tenant's partition; 0 for "", and none if the tenant has none yet.
  std::optional<uint32_t> PartitionOf(const std::string& tenant) const;
  // Adds the partition of a tenant that has none. Returns its number: they count from 1.
  uint32_t AddPartition(const std::string& tenant, TimePoint now);
  // Returns the tenant of a partition; "" for partition 0.
  const std::string& TenantOf(uint32_t partition) const { return partitions_[partition].tenant; }
  void NoteUse(uint32_t partition, TimePoint now) { partitions_[partition].used = now; }

  std::optional<Slot> Allocate(uint64_t bytes, uint32_t partition);
  void Free(const Slot& slot) { slots_.Free(slot); }
  // Records that the slab has more memory than before.
  void Grow(uint32_t slab, uint64_t bytes);

  // Counts of slabs as one partition sees them, until a slab changes its partition or its phase.
  struct Parts {
    uint32_t partition = 0;
    std::map<uint32_t, size_t> owned;  // slabs of each partition
    size_t kept = 0;                   // slabs that it gave up and that its processes still map
    size_t part = 0;                   // slabs that each partition may have

    size_t own() const { return owned.at(partition); }
  };
  // Costs O(slabs).
  Parts CountParts(uint32_t partition) const;

  // Whether the partition has as many slabs as it may, if one counts those that its processes keep:
  // giving slabs up without letting them go brings a tenant no others.
  static bool KeepsItsPart(const Parts& parts) {
    return parts.kept > 0 && parts.own() + parts.kept >= parts.part;
  }
  // Takes a slab that was given up and is not in `tried` to kRenewing. Returns none if there is
  // none that may be looked at now.
  std::optional<uint32_t> TakeUnused(std::span<const uint32_t> tried, TimePoint now);
  // Whether enough slabs have no pages that the partition may take one of them.
  bool MayTakeIdle(const Parts& parts) const;
  // Gives up a slab without pages of another partition, and returns it. Returns none if there is
  // no such slab.
  std::optional<uint32_t> GiveUpIdle(uint32_t partition, TimePoint now);
  // Closes the slab that another partition must give up for this one. Returns false if there is
  // none. One at a time: not while a slab is closing, or processes may yet let one go that was
  // given up.
  bool CloseOneFor(const Parts& parts, TimePoint now);
  // The slabs in kClosing that may be looked at now.
  std::vector<uint32_t> Closing(TimePoint now) const;
  // Fills `owners` with those of the next chunk of a slab in kClosing (SlotAllocator::NextOwners).
  // Returns false once its pages have all been looked at since it was closed, or since GiveUp:
  // however many calls it takes, each page is looked at once.
  bool NextClosing(uint32_t slab, std::vector<uint32_t>& owners);
  // Takes a slab that is closing, or has no pages, to kGone. Returns false if some of its pages are
  // left; then they are looked at again later, all of them.
  bool GiveUp(uint32_t slab, TimePoint now);

  // Whether the slab may be taken from processes that did not let it go.
  bool MayRevoke(uint32_t slab, TimePoint now) const;
  // Records how giving back the file of a slab in kRenewing ended; `revoked`: it was taken from
  // processes that have it.
  void EndDrop(uint32_t slab, SlabMemory::Drop drop, bool revoked, uint64_t free_before,
               TimePoint now);
  // Records that the slab has a fresh file, or takes it to kGone because none could be made.
  void EndRenewal(uint32_t slab, bool fresh, TimePoint now);
  // Makes a slab in kRenewing the partition's. REQUIRES: it was never written to, or has a fresh
  // file.
  void Give(uint32_t slab, uint32_t partition, TimePoint now);

  // Counts that a slab of the process before was found pinned.
  void NotePinnedCheck() { ++pinned_checks_; }

  // Slabs that were revoked, whose memory may be pinned outside, by tenant and in all.
  const std::map<std::string, uint64_t>& revoked() const { return revoked_; }
  uint64_t revoked_sum() const { return revoked_sum_; }
  void SetRevoked(const std::map<std::string, uint64_t>& revoked);

  // Fills the fields on slabs, and adds the capacity of those that are in no partition.
  void AddStats(StoreStats& stats) const;

 private:
  struct Partition {
    std::string tenant;
    TimePoint used;
  };
  // Whether a slab was given up so lately that processes may let it go yet: no other is taken from
  // its tenant meanwhile.
  bool Settling(TimePoint now) const;
  // Returns the slab that another partition must give up for this one; none if this one has its
  // part.
  std::optional<uint32_t> SlabToClose(const Parts& parts, TimePoint now) const;

  const HostOptions& options_;
  SlotAllocator& slots_;
  const InheritedSlabs& inherited_;
  std::vector<Slab> slabs_;
  std::vector<Partition> partitions_;
  absl::flat_hash_map<std::string, uint32_t> partition_of_tenant_;
  uint64_t moves_ = 0;
  size_t next_gone_ = 0;  // the slab that TakeUnused examines first
  uint64_t revoked_sum_ = 0;
  std::map<std::string, uint64_t> revoked_;
  uint64_t renewals_failed_ = 0;
  // When an own slab that was found pinned may be looked at again, and how often one of either kind
  // was found so.
  TimePoint pinned_retry_ = TimePoint::min();
  uint64_t pinned_checks_ = 0;
};

}  // namespace crumb::storage
