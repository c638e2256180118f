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

// What this process has of one slot of a pool.
struct SlotRecord {
  int uses = 0;  // 0: nothing
  bool committed = false;
  bool withdrawn = false;  // the page there is damaged
  // Of the page there, with sums: as it was committed here, or encoded, as crumbd told it. Neither:
  // blank, or not known.
  std::shared_ptr<const FragmentHeader> header;
  std::span<const std::byte> encoded_header;
  std::shared_ptr<const void> encoded_header_keeper;
  std::shared_ptr<PoolSession> held_by;  // that it is to be released to; null: a lease holds it
};

// Records by slot number, as many as there are slots within reach. Not thread-safe.
class SlotRecords {
 public:
  // A record for a slot that is used from now on, once more if it is used already.
  SlotRecord& Use(uint64_t slot) {
    if (slot >= records_.size()) records_.resize(slot + 1);
    SlotRecord& record = records_[slot];
    if (record.uses++ == 0) ++used_;
    return record;
  }
  // Null: the slot is not used. Valid until the next Use.
  SlotRecord* Find(uint64_t slot) {
    return slot < records_.size() && records_[slot].uses > 0 ? &records_[slot] : nullptr;
  }
  void Erase(SlotRecord& record) {
    record = SlotRecord();
    --used_;
  }
  size_t used() const { return used_; }
  // Calls visit(slot, record) for every slot that is used, in order.
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
