// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "storage/uniform_slots.h"

#include <algorithm>

namespace crumb::storage {

bool UniformSlots::HasHandle(uint32_t number) const { return Has(uint64_t{number} * per_handle_); }

bool UniformSlots::Has(uint64_t number) const {
  return number < states_.size() && states_[number] != State::kAbsent;
}

bool UniformSlots::Taken(uint64_t number) const {
  return Has(number) && states_[number] == State::kTaken;
}

bool UniformSlots::AddHandle(uint32_t number, Fresh fresh) {
  if (HasHandle(number)) return false;
  const uint64_t first = uint64_t{number} * per_handle_;
  const uint64_t end = first + per_handle_;
  if (states_.size() < end) states_.resize(end, State::kAbsent);
  for (uint64_t slot = end; slot > first; --slot) {
    states_[slot - 1] = fresh == Fresh::kFree ? State::kFree : State::kUnknown;
    if (fresh == Fresh::kFree) free_.push_back(slot - 1);
  }
  if (fresh == Fresh::kUnknown) {
    unknown_ += per_handle_;
    let_go_ = Fresh::kUnknown;
  }
  ++handles_;
  return true;
}

std::optional<uint64_t> UniformSlots::Take() {
  if (free_.empty()) return std::nullopt;
  const uint64_t number = free_.back();
  free_.pop_back();
  states_[number] = State::kTaken;
  ++used_;
  return number;
}

bool UniformSlots::TakeAt(uint64_t number) {
  if (!Has(number) || states_[number] == State::kTaken) return false;
  if (states_[number] == State::kFree) {
    free_.erase(std::find(free_.begin(), free_.end(), number));
  } else {
    --unknown_;
  }
  states_[number] = State::kTaken;
  ++used_;
  return true;
}

void UniformSlots::FreeUnknown() {
  for (uint64_t slot = states_.size(); slot > 0; --slot) {
    if (states_[slot - 1] != State::kUnknown) continue;
    states_[slot - 1] = State::kFree;
    free_.push_back(slot - 1);
  }
  unknown_ = 0;
  let_go_ = Fresh::kFree;
}

void UniformSlots::Free(uint64_t number) {
  --used_;
  if (let_go_ == Fresh::kUnknown) {
    states_[number] = State::kUnknown;
    ++unknown_;
    return;
  }
  states_[number] = State::kFree;
  free_.push_back(number);
}

Slot UniformSlots::At(uint64_t number) const {
  return {.region = static_cast<uint32_t>(number / per_handle_),
          .bytes = slot_bytes_,
          .offset = number % per_handle_ * slot_bytes_};
}

}  // namespace crumb::storage
