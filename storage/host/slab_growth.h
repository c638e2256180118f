// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "common/mutex.h"
#include "storage/host/host_room.h"

namespace crumb::storage {

// Grows host memory in the background, after a start or a takeover: allocates the memory that
// HostState::Open left, moves pages out of the slabs that a predecessor filled (InheritedSlabs),
// and gives up the slabs that are empty then. Thread-safe.
class SlabGrowth {
 public:
  // REQUIRES: memory of a predecessor, if any, was adopted. The time limit after which Grow evicts
  // pages that find no room begins here.
  SlabGrowth(HostState& state, HostRoom& room)
      : state_(state), room_(room), progress_(state.clock.Now()) {}

  // Allocates up to `bytes` more of the memory that Open left, moves pages out of adopted slabs as
  // far as there is room, and gives empty ones up. Returns how many bytes are still to be allocated
  // or moved. Own slabs, adopted slabs, and given-up slabs that other processes still map together
  // take at most one slab more than host.bytes_max. If the system cannot provide that slab, the
  // pages of one adopted slab are evicted after a while to make room. A second slab is not evicted
  // before as much memory was allocated as was given up. kResourceExhausted: the system has no such
  // memory. Blocks.
  absl::StatusOr<uint64_t> Grow(uint64_t bytes);

 private:
  enum class Move { kMoved, kInUse, kNoRoom, kGone };

  absl::Status TakeMemory(uint64_t bytes) ABSL_EXCLUSIVE_LOCKS_REQUIRED(growing_);
  void EmptyInherited() ABSL_EXCLUSIVE_LOCKS_REQUIRED(growing_);
  Move MovePage(PageHandle page, uint32_t region);
  void EvictForRoom(PageHandle page);
  // Gives back the memory of slabs that were given up and that no process has any of.
  void DropLeaving() ABSL_EXCLUSIVE_LOCKS_REQUIRED(growing_);
  bool GiveUpIfEmpty(uint32_t region) ABSL_EXCLUSIVE_LOCKS_REQUIRED(growing_);

  HostState& state_;
  HostRoom& room_;
  Mutex growing_;  // one Grow at a time
  // Time at which a page was moved or a slab given up last.
  TimePoint progress_ ABSL_GUARDED_BY(growing_);
  uint64_t given_up_bytes_ ABSL_GUARDED_BY(growing_) = 0;
  // Time of the next check of kept slabs, if the last one found pinned pages.
  TimePoint kept_retry_ ABSL_GUARDED_BY(growing_) = TimePoint::min();
};

// Returns how many slabs fewer than bytes_max crumbd may allocate, because `held` slabs of a
// predecessor still have pages, other processes map `kept` slabs that were given up, and may have
// pinned pages of `revoked` slabs. One slab and HostOptions::revoked_slabs_max revoked slabs may
// exist in addition to bytes_max.
uint64_t SlabsBeside(uint64_t held, uint64_t kept, uint64_t revoked, const HostOptions& options);

}  // namespace crumb::storage
