// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "storage/slot_space.h"

namespace crumb::storage {

// The slots of a device pool: handles of one size, numbered from 0, cut into slots of one size from
// their beginning on. A slot has a number, counted through all handles. Keeps numbers only. Not
// thread-safe.
class UniformSlots final : public SlotSpace {
 public:
  // A handle has room for one slot at least.
  UniformSlots(uint32_t slot_bytes, uint64_t handle_bytes)
      : slot_bytes_(slot_bytes),
        handle_bytes_(handle_bytes),
        per_handle_(static_cast<uint32_t>(handle_bytes / slot_bytes)) {}

  // What slots of an added handle are: free, or not known, so that only TakeAt takes them.
  enum class Fresh { kFree, kUnknown };
  // False: the number is taken. Numbers may come in any order.
  bool AddHandle(uint32_t number, Fresh fresh);
  bool HasHandle(uint32_t number) const;

  // Any free slot; none when there is none.
  std::optional<uint64_t> Take();
  // This slot, when it is free or not known.
  bool TakeAt(uint64_t number);
  // Makes slots free that nobody has taken.
  void FreeUnknown();
  // Of a taken slot. Between an AddHandle of unknown ones and FreeUnknown it is not known either.
  void Free(uint64_t number);
  void Free(const Slot& slot) override { Free(NumberOf(slot)); }
  void SetOwner(const Slot&, uint32_t) override {}

  bool Has(uint64_t number) const;
  bool Taken(uint64_t number) const;
  Slot At(uint64_t number) const;
  uint64_t NumberOf(const Slot& slot) const {
    return uint64_t{slot.region} * per_handle_ + slot.offset / slot_bytes_;
  }

  uint64_t free() const { return free_.size(); }
  uint64_t total() const { return handles_ * per_handle_; }
  uint64_t handles() const { return handles_; }
  uint64_t unknown() const { return unknown_; }
  uint64_t capacity_bytes() const override { return total() * slot_bytes_; }
  uint64_t used_bytes() const override { return used_ * slot_bytes_; }
  uint64_t waste_bytes() const override {
    return handles_ * (handle_bytes_ - uint64_t{per_handle_} * slot_bytes_);
  }

 private:
  enum class State : uint8_t { kAbsent, kUnknown, kFree, kTaken };

  const uint32_t slot_bytes_;
  const uint64_t handle_bytes_;
  const uint32_t per_handle_;
  uint64_t handles_ = 0;
  uint64_t used_ = 0;
  uint64_t unknown_ = 0;
  Fresh let_go_ = Fresh::kFree;  // what a slot is that Free is called of
  std::vector<State> states_;    // by slot number
  std::vector<uint64_t> free_;   // as a stack
};

}  // namespace crumb::storage
