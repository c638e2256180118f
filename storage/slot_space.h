// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace crumb::storage {

// Room for one fragment.
struct Slot {
  uint32_t region = 0;      // slab, extent or handle of a device pool
  uint32_t bytes = 0;       // the fragment's size rounded up to the granule
  uint64_t offset = 0;      // in the region
  uint8_t chunk_order = 0;  // its chunk has SlotAllocator::kChunkBytesMin << chunk_order bytes

  friend bool operator==(const Slot&, const Slot&) = default;
};

// The source of an index's slots, as far as the index must know it. Not thread-safe.
class SlotSpace {
 public:
  virtual ~SlotSpace() = default;

  // Notes whose slot it is.
  virtual void SetOwner(const Slot& slot, uint32_t owner) = 0;
  virtual void Free(const Slot& slot) = 0;

  virtual uint64_t capacity_bytes() const = 0;
  virtual uint64_t used_bytes() const = 0;   // slots in use
  virtual uint64_t waste_bytes() const = 0;  // that can be no slot
};

}  // namespace crumb::storage
