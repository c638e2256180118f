// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "common/mutex.h"
#include "storage/host_room.h"

namespace crumb::storage {

// Takes the memory that HostState::Open left, moves pages out of the slabs that the process before
// filled, and gives the empty ones up. Thread-safe.
class SlabGrowth {
 public:
  // Make it when memory was adopted, if it is: pages wait from then on for room to move to.
  SlabGrowth(HostState& state, HostRoom& room)
      : state_(state), room_(room), progress_(state.clock.Now()) {}

  // Takes up to `bytes` more of the memory that Open left, moves pages out of adopted slabs as far
  // as there is room, and gives empty ones up. Returns how many bytes are missing or to be moved
  // then. Own and adopted slabs together, and those that other processes keep though they were
  // given up, take at most one slab more than host.bytes_max. If the system does not give that
  // slab, the pages of one adopted slab are evicted after a while to make room for it. No second
  // slab is evicted before as much memory was obtained as was given up. kResourceExhausted: the
  // memory is not there. Blocks meanwhile.
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
  Mutex growing_;                                 // one Grow at a time
  TimePoint progress_ ABSL_GUARDED_BY(growing_);  // when a page moved or a slab was given up
  uint64_t given_up_bytes_ ABSL_GUARDED_BY(growing_) = 0;
  // When a kept slab that was found pinned may be looked at again.
  TimePoint kept_retry_ ABSL_GUARDED_BY(growing_) = TimePoint::min();
};

// Returns how many slabs' memory must be left, because pages are read in `held` slabs of the
// process before, other processes keep `kept` slabs that are not used any more, and may have pinned
// pages of `revoked` slabs. One slab and HostOptions::revoked_slabs_max revoked ones may be there
// beside bytes_max.
uint64_t SlabsBeside(uint64_t held, uint64_t kept, uint64_t revoked, const HostOptions& options);

}  // namespace crumb::storage
