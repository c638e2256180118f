// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "client/device/slot_pool.h"

#include <utility>

#include "common/status_macros.h"

namespace crumb::client {

absl::StatusOr<std::unique_ptr<SlotPool>> SlotPool::Create(
    Device& device, std::shared_ptr<const TimelineSet> timelines, std::string name,
    size_t slot_bytes, int count) {
  auto state = std::make_shared<State>();
  state->timelines = std::move(timelines);
  CRUMB_ASSIGN_OR_RETURN(state->memory, NewDeviceBuffer(device, slot_bytes * count));
  {
    MutexLock lock(&state->mutex);
    for (int i = count; i-- > 0;) {
      state->unused.push_back(state->memory.get() + slot_bytes * i);
    }
  }
  return std::unique_ptr<SlotPool>(new SlotPool(std::move(name), std::move(state)));
}

absl::StatusOr<bool> SlotPool::WaitForUsers(const Retired& slot, DeviceStream stream) {
  for (const Moment& user : slot.users) {
    if (user.timeline->stream() == stream) continue;  // in order anyway
    CRUMB_ASSIGN_OR_RETURN(const bool waits, user.timeline->MakeWait(stream, user.pass));
    if (!waits) return false;
  }
  return true;
}

absl::Status SlotPool::Gather(State& state, int count, DeviceStream stream,
                              std::vector<DeviceAddress>* taken) {
  while (static_cast<int>(taken->size()) < count && !state.unused.empty()) {
    taken->push_back(state.unused.back());
    state.unused.pop_back();
  }
  // Slots of passes that are still open elsewhere go to the end.
  for (size_t tries = state.retired.size(); tries-- > 0;) {
    if (static_cast<int>(taken->size()) == count) return absl::OkStatus();
    Retired slot = std::move(state.retired.front());
    state.retired.pop_front();
    const absl::StatusOr<bool> usable = WaitForUsers(slot, stream);
    if (usable.ok() && *usable) {
      taken->push_back(slot.address);
    } else {
      state.retired.push_back(std::move(slot));
    }
    CRUMB_RETURN_IF_ERROR(usable.status());
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<std::shared_ptr<const ResidentSlot>>> SlotPool::Take(
    int count, DeviceStream stream) {
  std::vector<DeviceAddress> taken;
  {
    MutexLock lock(&state_->mutex);
    const absl::Status gathered = Gather(*state_, count, stream, &taken);
    if (!gathered.ok() || static_cast<int>(taken.size()) < count) {
      // `stream` waits for their users, another one may not.
      const std::vector<Moment> now = state_->timelines->Now();
      for (const DeviceAddress address : taken) state_->retired.push_back({address, now});
      CRUMB_RETURN_IF_ERROR(gathered);
      return absl::ResourceExhaustedError("no room for " + std::to_string(count) + " more " +
                                          name_ + ": end other sequences first");
    }
  }
  std::vector<std::shared_ptr<const ResidentSlot>> slots;
  for (const DeviceAddress address : taken) {
    slots.emplace_back(new ResidentSlot{address}, [state = state_](const ResidentSlot* slot) {
      std::vector<Moment> now = state->timelines->Now();
      MutexLock lock(&state->mutex);
      state->retired.push_back({slot->address, std::move(now)});
      delete slot;
    });
  }
  return slots;
}

int SlotPool::free() const {
  MutexLock lock(&state_->mutex);
  return static_cast<int>(state_->unused.size() + state_->retired.size());
}

}  // namespace crumb::client
