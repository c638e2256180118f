// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "storage/device/uniform_slots.h"

#include <utility>

namespace crumb::storage {

bool UniformSlots::AddHandle(uint32_t number, std::vector<State> states) {
  if (HasHandle(number)) return false;
  if (handles_.size() <= number) handles_.resize(size_t{number} + 1);
  handles_[number].states = std::move(states);
  unswept_.push_back(number);
  ++handle_count_;
  return true;
}

uint64_t UniformSlots::MarkTaken(uint64_t number) {
  StateOf(number) = State::kTaken;
  ++used_;
  return number;
}

std::optional<uint64_t> UniformSlots::Take() {
  if (recovering_) return std::nullopt;
  if (!free_.empty()) {
    const uint64_t number = free_.back();
    free_.pop_back();
    return MarkTaken(number);
  }
  while (!unswept_.empty()) {
    const uint32_t number = unswept_.back();
    Handle& handle = handles_[number];
    while (handle.swept < per_handle_) {
      const uint32_t index = handle.swept++;
      if (handle.states[index] == State::kFresh) {
        return MarkTaken(uint64_t{number} * per_handle_ + index);
      }
    }
    unswept_.pop_back();
  }
  return std::nullopt;
}

bool UniformSlots::TakeAt(uint64_t number) {
  if (!Has(number) || StateOf(number) != State::kFresh) return false;
  MarkTaken(number);
  return true;
}

void UniformSlots::Free(uint64_t number) {
  --used_;
  if (recovering_) {
    StateOf(number) = State::kFresh;
    return;
  }
  StateOf(number) = State::kFree;
  free_.push_back(number);
}

Slot UniformSlots::At(uint64_t number) const {
  return {.region = static_cast<uint32_t>(number / per_handle_),
          .bytes = slot_bytes_,
          .offset = number % per_handle_ * slot_bytes_};
}

}  // namespace crumb::storage
