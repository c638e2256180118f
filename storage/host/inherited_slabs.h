// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/mapping.h"
#include "common/unique_fd.h"
#include "storage/host/slab_memory.h"
#include "storage/slot_allocator.h"
#include "storage/tiered_store.h"

namespace crumb::storage {

// Slabs that a predecessor process filled. Their seals allow no new writable mapping, so their
// content is final: pages are read there until SlabGrowth moves them out.
//
//            the last page is freed, GiveUp          no process uses its memory
//   held ------------------------------------> leaving -----------------------> freed
//
// GiveUp unmaps the slab; its number and its address range are not used again. A slab of a tenant
// may shrink: its file then waits in leaving() until GiveBackUnread shows that no process uses its
// memory. Memory of other slabs is freed when the last process closes the file.
//
// Data and descriptors are read without a lock; the rest is not thread-safe: the tier's lock covers
// it.
class InheritedSlabs {
 public:
  // Partition of a slab that has pages of several partitions.
  static constexpr uint32_t kMixed = UINT32_MAX;
  // Maps slabs of `slab_bytes` each as regions first_region, first_region + 1, ... All pages of
  // slab i are of partitions[i], or of several partitions if that is kMixed. kDataLoss: a slab has
  // another size, is not sealed against writing, or could be shrunk by another user.
  absl::Status Adopt(std::vector<UniqueFd> slabs, uint64_t slab_bytes, uint32_t first_region,
                     std::span<const uint32_t> partitions);

  bool Holds(uint32_t region) const {
    return region >= first_region_ && region - first_region_ < slabs_.size();
  }
  uint32_t first_region() const { return first_region_; }
  std::byte* data(uint32_t region) const { return slabs_[region - first_region_].mapping.data(); }
  uint32_t partition(uint32_t region) const { return slabs_[region - first_region_].partition; }
  // Whether the file may shrink. Returns false for a slab that was given up.
  bool Shrinks(uint32_t region) const {
    const Inherited& slab = slabs_[region - first_region_];
    return slab.held && slab.shrinks;
  }
  // Returns a read-only descriptor of a slab. kNotFound: it was given up.
  absl::StatusOr<UniqueFd> OpenReader(uint32_t region) const;
  // Returns the descriptor that the predecessor handed over, to hand it over again.
  int file(uint32_t region) const { return slabs_[region - first_region_].fd.get(); }
  // Appends read-only descriptors of all slabs in their order. A slab that was given up is
  // represented by an empty file of its size.
  void AppendTo(std::vector<Slab>& slabs) const;

  // Marks a slot as used by `owner`. Returns false if it exceeds its slab or overlaps a used slot.
  bool Claim(const Slot& slot, uint32_t owner);
  void SetOwner(const Slot& slot, uint32_t owner);
  void Free(const Slot& slot);

  // Returns the slabs that are not given up, sorted by bytes in use, fewest first.
  std::vector<uint32_t> Held() const;
  std::vector<uint32_t> OwnersIn(uint32_t region) const;
  uint64_t used_bytes(uint32_t region) const { return slabs_[region - first_region_].used_bytes; }
  // Unmaps a slab without slots in use.
  absl::Status GiveUp(uint32_t region);

  // The file of a slab that was given up and may shrink, while other processes may use its memory.
  struct Leaving {
    UniqueFd file;
    uint32_t partition = kMixed;
    bool pinned = false;  // the last GiveBackUnread found pinned pages in it
  };
  // Adds a file of `slab_bytes` that the predecessor gave up. Returns false, and does not count its
  // memory, if this process cannot free it because of its size, its seals or its owner.
  bool AddLeaving(UniqueFd file, uint64_t slab_bytes, uint32_t partition);
  // Removes and returns the leaving files. The caller passes each to GiveBackUnread, and to
  // PutLeaving those whose memory is still in use.
  std::vector<Leaving> TakeLeaving() { return std::exchange(leaving_, {}); }
  void PutLeaving(std::vector<Leaving> slabs) { leaving_ = std::move(slabs); }
  const std::vector<Leaving>& leaving() const { return leaving_; }

  uint64_t held_bytes() const { return held_bytes_; }  // sum over slabs that are not given up
  uint64_t used_bytes() const { return used_bytes_; }

 private:
  struct Claimed {
    uint32_t bytes = 0;
    uint32_t owner = 0;
  };
  struct Inherited {
    UniqueFd fd;
    UniqueFd reader;
    bool shrinks = false;
    Mapping mapping;
    std::map<uint64_t, Claimed> claimed;  // used slots, keyed by offset
    uint64_t used_bytes = 0;
    bool held = true;
    uint32_t partition = kMixed;
  };

  uint32_t first_region_ = 0;
  uint64_t slab_bytes_ = 0;
  std::vector<Inherited> slabs_;
  UniqueFd empty_file_;  // AppendTo returns it for a slab that was given up
  // Files that still count as used memory: a descriptor in another process may keep it allocated.
  std::vector<Leaving> leaving_;
  uint64_t held_bytes_ = 0;
  uint64_t used_bytes_ = 0;
};

// Frees the memory of a slab's file if no other process uses it, like SlabMemory::TryDrop. Blocks
// for up to 200 ms if pages are pinned.
SlabMemory::Drop GiveBackUnread(const UniqueFd& file);

}  // namespace crumb::storage
