// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "client/device/owned.h"
#include "client/device/timeline.h"
#include "common/mutex.h"

namespace crumb::client {

// Room of one size in device memory. Given back with its last reference; the next user's stream
// waits for the passes that may still use it.
struct ResidentSlot {
  DeviceAddress address = 0;
};

// Equal slots in one piece of device memory. Slots may outlive the pool. Thread-safe.
class SlotPool {
 public:
  // `name` is for messages. `device` is borrowed; slots must not outlive it.
  static absl::StatusOr<std::unique_ptr<SlotPool>> Create(
      Device& device, std::shared_ptr<const TimelineSet> timelines, std::string name,
      size_t slot_bytes, int count);

  // `count` slots whose earlier users' work comes before what is enqueued on `stream` from now on.
  // kResourceExhausted: there are not so many, none is taken.
  absl::StatusOr<std::vector<std::shared_ptr<const ResidentSlot>>> Take(int count,
                                                                        DeviceStream stream);

  // Slots that nobody holds, those that wait for their users' work included.
  int free() const;

 private:
  struct Retired {
    DeviceAddress address = 0;
    std::vector<Moment> users;
  };
  struct State {
    std::shared_ptr<const TimelineSet> timelines;
    DeviceBuffer memory;
    mutable Mutex mutex;
    std::vector<DeviceAddress> unused ABSL_GUARDED_BY(mutex);
    std::deque<Retired> retired ABSL_GUARDED_BY(mutex);
  };
  SlotPool(std::string name, std::shared_ptr<State> state)
      : name_(std::move(name)), state_(std::move(state)) {}
  static absl::StatusOr<bool> WaitForUsers(const Retired& slot, DeviceStream stream);
  static absl::Status Gather(State& state, int count, DeviceStream stream,
                             std::vector<DeviceAddress>* taken)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(state.mutex);

  const std::string name_;
  const std::shared_ptr<State> state_;
};

}  // namespace crumb::client
