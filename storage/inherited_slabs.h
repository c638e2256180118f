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
#include "storage/slab_memory.h"
#include "storage/slot_allocator.h"
#include "storage/tiered_store.h"

namespace crumb::storage {

// Slabs that the process before filled. Their seals allow no new writable mapping, so what is in
// them stays as it is: pages are read there, move out, and an empty slab is given up. Its number
// and address stay taken. The memory of a slab that may shrink (a tenant's) is given back once no
// process has any of it; of one that may not, when the last process closes it. Data and descriptors
// are read without a lock; the rest is not thread-safe: the tier's lock covers it.
class InheritedSlabs {
 public:
  // Slabs of `slab_bytes` each, as regions from `first_region` on. kDataLoss: one is of another
  // size, not sealed against writing, or could be shrunk by another user.
  // `partitions[i]` of the table is whose pages alone the i-th holds; kMixed: of several.
  static constexpr uint32_t kMixed = UINT32_MAX;
  absl::Status Adopt(std::vector<UniqueFd> slabs, uint64_t slab_bytes, uint32_t first_region,
                     std::span<const uint32_t> partitions);

  bool Holds(uint32_t region) const {
    return region >= first_region_ && region - first_region_ < slabs_.size();
  }
  uint32_t first_region() const { return first_region_; }
  std::byte* data(uint32_t region) const { return slabs_[region - first_region_].mapping.data(); }
  uint32_t partition(uint32_t region) const { return slabs_[region - first_region_].partition; }
  // False for a slab that was given up, too.
  bool Shrinks(uint32_t region) const {
    const Inherited& slab = slabs_[region - first_region_];
    return slab.held && slab.shrinks;
  }
  // Another descriptor of a slab, for reading only. kNotFound: it was given up.
  absl::StatusOr<UniqueFd> OpenReader(uint32_t region) const;
  // The descriptor that the process before handed over, for the next one.
  int file(uint32_t region) const { return slabs_[region - first_region_].fd.get(); }
  // In order, read-only. A descriptor of a slab that was given up is that of an empty file of its
  // size.
  void AppendTo(std::vector<Slab>& slabs) const;

  // Takes a slot. Returns false when it is outside, or some of it is taken.
  bool Claim(const Slot& slot, uint32_t owner);
  void SetOwner(const Slot& slot, uint32_t owner);
  void Free(const Slot& slot);

  // The slabs that are not given up, those with the fewest bytes in use first.
  std::vector<uint32_t> Held() const;
  std::vector<uint32_t> OwnersIn(uint32_t region) const;
  uint64_t used_bytes(uint32_t region) const { return slabs_[region - first_region_].used_bytes; }
  // Unmaps a slab without slots in use.
  absl::Status GiveUp(uint32_t region);

  // The file of a slab that crumbd uses no more, which may shrink, and whose memory other processes
  // may still have.
  struct Leaving {
    UniqueFd file;
    uint32_t partition = kMixed;
    bool pinned = false;  // pages of it were, when GiveBackUnread was called last
  };
  // Adds a file of `slab_bytes` that the process before gave up. Its memory stays uncounted if this
  // process cannot give it back (another size, other seals or another owner): false.
  bool AddLeaving(UniqueFd file, uint64_t slab_bytes, uint32_t partition);
  // The caller passes them to GiveBackUnread, and those whose memory is not free to PutLeaving.
  std::vector<Leaving> TakeLeaving() { return std::exchange(leaving_, {}); }
  void PutLeaving(std::vector<Leaving> slabs) { leaving_ = std::move(slabs); }
  const std::vector<Leaving>& leaving() const { return leaving_; }

  uint64_t held_bytes() const { return held_bytes_; }  // of slabs not given up
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
    std::map<uint64_t, Claimed> claimed;  // by offset
    uint64_t used_bytes = 0;
    bool held = true;
    uint32_t partition = kMixed;
  };

  uint32_t first_region_ = 0;
  uint64_t slab_bytes_ = 0;
  std::vector<Inherited> slabs_;
  UniqueFd nothing_;  // what takes the place of a slab that was given up
  // Until the kernel shows that their memory is free: a descriptor elsewhere would keep it.
  std::vector<Leaving> leaving_;
  uint64_t held_bytes_ = 0;
  uint64_t used_bytes_ = 0;
};

// Gives the memory of a slab's file back if no other process has any of it, as
// SlabMemory::TryDrop does. Blocks up to 200 ms when pages are pinned.
SlabMemory::Drop GiveBackUnread(const UniqueFd& file);

}  // namespace crumb::storage
