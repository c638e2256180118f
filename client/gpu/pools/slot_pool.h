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

// SlotRef is a slot in device memory, private or of a device pool. It returns to its pool with the
// last reference; the stream of its next user waits for the passes that may still use it.
struct SlotRef {
  DeviceAddress address = 0;
  std::shared_ptr<const DeviceSlot> shared;  // the slot of a device pool; null: the slot is private
};

// SlotPool provides slots of one size: private ones in one allocation of device memory, and those
// of a device pool if the worker takes part in one. Private slots may outlive the pool.
// Thread-safe.
//
// A private slot is unused, taken (a SlotRef exists), or retired (passes that began before its
// release may still use it). A slot of a device pool that was released waits for such passes in
// `leaving`.
//
// Taking a slot orders the taker's stream behind the passes that may still read it; no call waits
// on the host for that.
class SlotPool {
 public:
  using Slots = std::vector<std::shared_ptr<const SlotRef>>;

  // `name` is used in messages. `device` is borrowed; slots must not outlive it.
  static absl::StatusOr<std::unique_ptr<SlotPool>> Create(
      Device& device, std::shared_ptr<const TimelineSet> timelines, std::string name,
      size_t slot_bytes, int count);
  // Creates a pool without slots; Provide allocates them.
  static std::unique_ptr<SlotPool> CreateEmpty(Device& device,
                                               std::shared_ptr<const TimelineSet> timelines,
                                               std::string name, size_t slot_bytes, int count);
  // Allocates the private slots, if they are not there yet. kResourceExhausted: there is no device
  // memory.
  absl::Status Provide();

  // Takes slots from `pool` from now on, as long as it has blank ones. `background` releases them
  // once the passes that may still use them are done. Both are borrowed until StopSharing. REQUIRES
  // of StopSharing: no pass is under way any more.
  void Share(DevicePool& pool, Background& background);
  void StopSharing();

  // Returns `count` slots; work enqueued on `stream` from now on runs after that of their earlier
  // users. Does not block. kResourceExhausted: there are too few slots, and none is taken.
  absl::StatusOr<Slots> Take(int count, DeviceStream stream);
  // Returns up to `count` slots, which are released in groups of kRunPages. Blocks on crumbd for
  // slots of the device pool.
  absl::StatusOr<Slots> TakeSome(int count, DeviceStream stream, Duration timeout);
  // Takes over slots of a device pool that are released together; `address` may lie inside a slot.
  Slots Adopt(std::vector<SlotRef> slots);
  // Called when a pass has ended, for which released slots may have waited.
  void PassEnded();

  // Returns the number of private slots that are not taken, including retired ones.
  int free() const;

 private:
  // A private slot that was released, until no pass uses it any more.
  struct Retired {
    DeviceAddress address = 0;
    // passes that may use the slots released with it
    std::shared_ptr<const std::vector<PassRef>> users;
  };
  struct PrivateSlots;
  struct AdoptedSlots;
  // Slots of a device pool that were released, until no pass uses them any more.
  struct Leaving {
    std::shared_ptr<const std::vector<SlotRef>> slots;
    std::vector<PassRef> users;
  };
  // The state that slots share with the pool, so that slots may outlive it. `mutex` is not held
  // while memory is allocated or crumbd is called.
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
    bool draining ABSL_GUARDED_BY(mutex) = false;  // a task for `leaving` is queued
  };
  SlotPool(std::string name, std::shared_ptr<State> state)
      : name_(std::move(name)), state_(std::move(state)) {}
  DevicePool* shared() const;
  // Takes over one slot of the device pool.
  std::shared_ptr<const SlotRef> AdoptOne(std::shared_ptr<const DeviceSlot> slot);
  // Returns `count` private slots, released in groups of `run`. kResourceExhausted: there are
  // fewer.
  absl::StatusOr<Slots> TakePrivate(int count, int run, DeviceStream stream);
  // Returns references to private slots that are released together.
  static Slots Private(const std::shared_ptr<State>& state,
                       std::span<const DeviceAddress> addresses);
  // Releases slots of a device pool: at once if no pass can use them, else in the background.
  static void GiveUp(const std::shared_ptr<State>& state,
                     std::shared_ptr<const std::vector<SlotRef>> slots);
  // Queues a task that releases slots whose passes are done (Drain).
  static void DrainSoon(const std::shared_ptr<State>& state)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(state->mutex);
  static void Drain(State& state);
  // Makes the stream wait for the passes, and notes them in `waited`. Returns false if one of them
  // has not ended, so that it cannot be waited for.
  static absl::StatusOr<bool> WaitForUsers(std::span<const PassRef> users, DeviceStream stream,
                                           std::vector<PassRef>* waited);
  // Adds usable slots to `taken`, unused ones first, until it has `count`.
  static absl::Status Gather(State& state, int count, DeviceStream stream,
                             std::vector<DeviceAddress>* taken)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(state.mutex);

  const std::string name_;
  const std::shared_ptr<State> state_;
};

}  // namespace crumb::client
