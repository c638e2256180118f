// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "storage/slot_allocator.h"

namespace crumb::storage {

// The slots of a device pool: handles of one size, numbered from 0, cut into slots of one size from
// their beginning on. A slot has a number, counted through all handles. Keeps numbers only. Not
// thread-safe.
//
// A slot is fresh when its handle is added, taken by Take or TakeAt, and free after Free. While the
// space recovers, the use of fresh slots is unknown: Take returns none, TakeAt claims them one by
// one, and Free makes them fresh again. EndRecovery makes every slot that is not taken available.
//
// Every call costs O(1), amortised: fresh slots are found by a cursor per handle instead of a list,
// so that neither AddHandle nor EndRecovery visits the slots.
class UniformSlots final : public SlotSpace {
 public:
  enum class State : uint8_t { kFresh, kFree, kTaken };

  // A handle has room for at least one slot.
  UniformSlots(uint32_t slot_bytes, uint64_t handle_bytes, bool recovering)
      : slot_bytes_(slot_bytes),
        handle_bytes_(handle_bytes),
        per_handle_(static_cast<uint32_t>(handle_bytes / slot_bytes)),
        recovering_(recovering) {}

  uint32_t per_handle() const { return per_handle_; }

  // `states` has per_handle() fresh entries; callers allocate it outside their locks because its
  // size is that of a handle. Returns false if the handle is there already. Handles may be added in
  // any order.
  bool AddHandle(uint32_t number, std::vector<State> states);
  bool HasHandle(uint32_t number) const {
    return number < handles_.size() && !handles_[number].states.empty();
  }

  bool recovering() const { return recovering_; }

  // Takes any slot. Returns none if all are taken, or while the space recovers.
  std::optional<uint64_t> Take();
  // Takes this slot if it is fresh; otherwise returns false. REQUIRES: the space recovers.
  bool TakeAt(uint64_t number);
  void EndRecovery() { recovering_ = false; }
  // REQUIRES: the slot is taken.
  void Free(uint64_t number);
  void Free(const Slot& slot) override { Free(NumberOf(slot)); }
  void SetOwner(const Slot&, uint32_t) override {}

  bool Has(uint64_t number) const {
    const uint64_t handle = number / per_handle_;
    return handle < handles_.size() && !handles_[handle].states.empty();
  }
  bool Taken(uint64_t number) const { return Has(number) && StateOf(number) == State::kTaken; }
  Slot At(uint64_t number) const;
  uint64_t NumberOf(const Slot& slot) const {
    return uint64_t{slot.region} * per_handle_ + slot.offset / slot_bytes_;
  }

  uint64_t total() const { return handle_count_ * per_handle_; }
  uint64_t handles() const { return handle_count_; }
  uint64_t free() const { return recovering_ ? 0 : total() - used_; }
  uint64_t unknown() const { return recovering_ ? total() - used_ : 0; }
  uint64_t capacity_bytes() const override { return total() * slot_bytes_; }
  uint64_t used_bytes() const override { return used_ * slot_bytes_; }
  uint64_t waste_bytes() const override {
    return handle_count_ * (handle_bytes_ - uint64_t{per_handle_} * slot_bytes_);
  }

 private:
  struct Handle {
    std::vector<State> states;  // empty: there is no such handle
    uint32_t swept = 0;         // no slot below it is fresh
  };
  State StateOf(uint64_t number) const {
    return handles_[number / per_handle_].states[number % per_handle_];
  }
  State& StateOf(uint64_t number) {
    return handles_[number / per_handle_].states[number % per_handle_];
  }
  uint64_t MarkTaken(uint64_t number);

  const uint32_t slot_bytes_;
  const uint64_t handle_bytes_;
  const uint32_t per_handle_;
  bool recovering_;
  uint64_t handle_count_ = 0;
  uint64_t used_ = 0;
  std::vector<Handle> handles_;    // indexed by handle number
  std::vector<uint32_t> unswept_;  // handles that may have fresh slots, as a stack
  std::vector<uint64_t> free_;     // slots that were freed, as a stack
};

}  // namespace crumb::storage
