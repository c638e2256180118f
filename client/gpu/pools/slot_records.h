// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "client/rpc/pool_link.h"
#include "common/fragment_header.h"

namespace crumb::client {

// The state of one slot of a pool in this process.
struct SlotRecord {
  int uses = 0;  // 0: the slot is not used
  bool committed = false;
  bool withdrawn = false;  // the page in the slot is damaged
  // The header of the page in the slot, with checksums: as this process committed it (`header`), or
  // as crumbd sent it (`encoded_header`). Neither: the slot is blank, or its page is unknown.
  std::shared_ptr<const FragmentHeader> header;
  std::span<const std::byte> encoded_header;
  std::shared_ptr<const void> encoded_header_owner;
  std::shared_ptr<PoolSession> held_by;  // the session that reserved it; null: a lease holds it
};

// SlotRecords has the records of a pool's slots by number. Not thread-safe.
//
// Memory is proportional to the highest slot number used, which the pool's size bounds.
class SlotRecords {
 public:
  // Adds a use of the slot and returns its record.
  SlotRecord& Use(uint64_t slot) {
    if (slot >= records_.size()) records_.resize(slot + 1);
    SlotRecord& record = records_[slot];
    if (record.uses++ == 0) ++used_;
    return record;
  }
  // Returns null if the slot is not used. The result is valid until the next Use.
  SlotRecord* Find(uint64_t slot) {
    return slot < records_.size() && records_[slot].uses > 0 ? &records_[slot] : nullptr;
  }
  // Ends the use of a slot. REQUIRES: Use or Find returned the record.
  void Erase(SlotRecord& record) {
    record = SlotRecord();
    --used_;
  }
  // Returns the number of slots in use.
  size_t used() const { return used_; }
  // Calls visit(slot, record) for every slot in use, in ascending order.
  template <typename Visit>
  void ForEach(const Visit& visit) const {
    for (uint64_t slot = 0; slot < records_.size(); ++slot) {
      if (records_[slot].uses > 0) visit(slot, records_[slot]);
    }
  }

 private:
  std::vector<SlotRecord> records_;
  size_t used_ = 0;
};

}  // namespace crumb::client
