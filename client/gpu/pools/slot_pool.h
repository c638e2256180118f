// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <deque>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "client/gpu/device/background.h"
#include "client/gpu/device/owned.h"
#include "client/gpu/device/timeline.h"
#include "client/gpu/pools/device_pool.h"
#include "common/clock.h"
#include "common/mutex.h"

namespace crumb::client {

// Room of one size in device memory. Given back with its last reference; the next user's stream
// waits for the passes that may still use it.
struct SlotRef {
  DeviceAddress address = 0;
  std::shared_ptr<const DeviceSlot> shared;  // of a device pool; null: private
};

// Equal slots: private ones in one piece of device memory, and those of a device pool where the
// worker takes part in one. Private slots may outlive the pool. Thread-safe.
class SlotPool {
 public:
  using Slots = std::vector<std::shared_ptr<const SlotRef>>;

  // `name` is for messages. `device` is borrowed; slots must not outlive it.
  static absl::StatusOr<std::unique_ptr<SlotPool>> Create(
      Device& device, std::shared_ptr<const TimelineSet> timelines, std::string name,
      size_t slot_bytes, int count);
  // The same without slots, until they are provided for.
  static std::unique_ptr<SlotPool> CreateEmpty(Device& device,
                                               std::shared_ptr<const TimelineSet> timelines,
                                               std::string name, size_t slot_bytes, int count);
  // Allocates the private slots, if they are not there yet. kResourceExhausted: no device memory.
  absl::Status Provide();

  // From now on slots are those of `pool` as long as it has blank ones. A shared slot that is given
  // up is let go by `background`, behind the passes that may still use it. Both borrowed, until
  // StopSharing, when no pass is under way any more.
  void Share(DevicePool& pool, Background& background);
  void StopSharing();

  // `count` slots whose earlier users' work comes before what is enqueued on `stream` from now on.
  // Waits for nothing. kResourceExhausted: there are not so many, none is taken.
  absl::StatusOr<Slots> Take(int count, DeviceStream stream);
  // As many as there are, `count` at most; asks crumbd for shared ones and blocks on that. They are
  // given up in runs of kRunPages.
  absl::StatusOr<Slots> TakeSome(int count, DeviceStream stream, Duration timeout);
  // Takes shared slots, given up together; `address` may lie behind a slot's begin.
  Slots Adopt(std::vector<SlotRef> slots);
  // A pass has ended on the host: shared slots may have waited for that.
  void PassEnded();

  // Private slots that nobody holds, those that wait for their users' work included.
  int free() const;

 private:
  struct Retired {
    DeviceAddress address = 0;
    std::shared_ptr<const std::vector<PassRef>> users;  // of all that were given up with it
  };
  struct PrivateSlots;
  struct AdoptedSlots;
  struct Leaving {
    std::shared_ptr<const std::vector<SlotRef>> slots;
    std::vector<PassRef> users;
  };
  struct State {
    Device* device = nullptr;
    size_t slot_bytes = 0;
    int count = 0;
    std::shared_ptr<const TimelineSet> timelines;
    Mutex provide_mutex;
    DeviceBuffer memory ABSL_GUARDED_BY(provide_mutex);
    mutable Mutex mutex;
    std::vector<DeviceAddress> unused ABSL_GUARDED_BY(mutex);
    std::deque<Retired> retired ABSL_GUARDED_BY(mutex);
    DevicePool* shared ABSL_GUARDED_BY(mutex) = nullptr;
    Background* background ABSL_GUARDED_BY(mutex) = nullptr;
    std::vector<Leaving> leaving ABSL_GUARDED_BY(mutex);
    bool draining ABSL_GUARDED_BY(mutex) = false;  // a task for `leaving` is under way
  };
  SlotPool(std::string name, std::shared_ptr<State> state)
      : name_(std::move(name)), state_(std::move(state)) {}
  DevicePool* shared() const;
  std::shared_ptr<const SlotRef> AdoptOne(std::shared_ptr<const DeviceSlot> slot);
  absl::StatusOr<Slots> TakePrivate(int count, int run, DeviceStream stream);
  static Slots Private(const std::shared_ptr<State>& state,
                       std::span<const DeviceAddress> addresses);
  static void GiveUp(const std::shared_ptr<State>& state,
                     std::shared_ptr<const std::vector<SlotRef>> slots);
  static void DrainSoon(const std::shared_ptr<State>& state)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(state->mutex);
  static void Drain(State& state);
  static absl::StatusOr<bool> WaitForUsers(std::span<const PassRef> users, DeviceStream stream,
                                           std::vector<PassRef>* waited);
  static absl::Status Gather(State& state, int count, DeviceStream stream,
                             std::vector<DeviceAddress>* taken)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(state.mutex);

  const std::string name_;
  const std::shared_ptr<State> state_;
};

}  // namespace crumb::client
