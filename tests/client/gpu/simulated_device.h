// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "client/gpu/device/device.h"
#include "common/mutex.h"
#include "tests/client/gpu/simulated_kernels.h"

namespace crumb::client {

// A device without a GPU. Work on a stream waits in a queue and runs when somebody waits for it, or
// before, in an order between streams that is as bad as the seed makes it: only streams' order and
// events are kept. So a missing event, memory that is used again too early, or a pinned table that
// is overwritten before it was read gives wrong bits, as it may on a GPU. Memory is filled with
// NaN when it is allocated. Copies of memory that is not pinned take what is there at once, as
// CUDA's do, and are counted.
//
// What a real device would refuse or get wrong (an address outside its memory, a wait while a
// stream is captured) is a failure of the test that runs. Thread-safe.
class SimulatedDevice final : public Device {
 public:
  // `name`: devices of one name, in other processes too, are one device to DeviceMemory. The names
  // of its peers are those of OpenPeerMemory's ordinals.
  explicit SimulatedDevice(uint32_t seed, size_t memory_max = SIZE_MAX,
                           std::string name = "simulated", std::vector<std::string> peers = {});
  ~SimulatedDevice() override;

  absl::StatusOr<DeviceAddress> Allocate(size_t bytes) override;
  void Free(DeviceAddress address) override;
  absl::StatusOr<std::byte*> AllocatePinned(size_t bytes) override;
  void FreePinned(std::byte* bytes) override;
  absl::Status Pin(std::span<const std::byte> bytes, PinAccess access) override;
  void Unpin(std::span<const std::byte> bytes) override;
  absl::StatusOr<DeviceStream> NewStream() override;
  absl::StatusOr<DeviceStream> NewUrgentStream() override { return NewStream(); }
  void DeleteStream(DeviceStream stream) override;
  absl::StatusOr<DeviceEvent> NewEvent() override;
  void DeleteEvent(DeviceEvent event) override;
  absl::Status Record(DeviceEvent event, DeviceStream stream) override;
  absl::Status Wait(DeviceStream stream, DeviceEvent event) override;
  absl::StatusOr<bool> Done(DeviceEvent event) override;
  absl::Status Synchronize(DeviceEvent event) override;
  absl::Status ToDevice(std::span<const DeviceCopy> copies, DeviceStream stream) override;
  absl::Status ToHost(std::span<const DeviceCopy> copies, DeviceStream stream) override;
  absl::Status CopyRows(const DeviceRowsCopy& copy, DeviceStream stream) override;
  absl::Status Clear(DeviceAddress address, size_t bytes, DeviceStream stream) override;
  DeviceKernels& kernels() override { return kernels_; }
  absl::StatusOr<std::unique_ptr<DeviceMemory>> OpenMemory() override;
  absl::StatusOr<std::unique_ptr<DeviceMemory>> OpenPeerMemory(int ordinal) override;
  bool kernels_read_pinned() const override { return true; }

  // Runs all that is queued on one stream, and what that waits for.
  void Drain(DeviceStream stream);

  // What is enqueued on `stream` between the two is kept, not run; Launch enqueues it once more.
  using Graph = std::shared_ptr<const std::vector<std::function<void()>>>;
  void BeginCapture(DeviceStream stream);
  Graph EndCapture(DeviceStream stream);
  void Launch(const Graph& graph, DeviceStream stream);

  // From now on waits of other threads make nothing run: they end when this thread's waits have
  // brought the device so far, or with EndUses.
  void HoldOthers();
  void EndUses();

  // All memory counts as pinned: copies of it are made when their turn comes.
  std::atomic<bool> everything_pinned{false};

  // Called for every copy to the host, before it is made: may change the device's bytes.
  std::function<void(const DeviceCopy&)> before_copy_to_host;
  // Calls of so many copies to the device, or more, fail before they enqueue any.
  std::atomic<size_t> copies_fail_from{SIZE_MAX};
  // From now on, every allocation and pinned allocation is a failure of the test.
  std::atomic<bool> allocations_forbidden{false};

  size_t live_allocations() const;  // device and pinned
  size_t live_handles() const;      // streams and events
  size_t pinned_ranges() const;
  size_t shared_ranges() const;  // mapped pieces of shared memory, peers' included
  uint64_t unpinned_copies() const { return unpinned_copies_.load(); }
  uint64_t fetched_from_host() const { return fetched_from_host_.load(); }  // tiles, by a kernel

 private:
  struct Event {
    uint64_t recorded = 0;
    uint64_t completed = 0;
  };
  struct Operation {
    std::function<void()> run;
    const Event* awaited = nullptr;  // runs when `completed` is `ticket` at least
    uint64_t ticket = 0;
  };
  struct Stream {
    std::deque<Operation> queue;
    uint32_t priority = 0;
    bool capturing = false;
    std::vector<std::function<void()>> captured;
  };

  friend class SimulatedKernels;
  class SharedMemory;
  class SharedRange;
  // Enqueues a kernel or a copy.
  absl::Status Enqueue(DeviceStream stream, std::function<void()> run);
  void Add(Stream& stream, Operation operation) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Runs the head of some stream that may run. False: none may.
  bool RunOne() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void RunUntil(const std::function<bool()>& done) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  Stream& Of(DeviceStream stream) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Whether all of it is in one pinned range; a part in one is a failure, as CUDA refuses it.
  bool Pinned(uint64_t address, size_t bytes) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void CheckOnDevice(DeviceAddress address, size_t bytes) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Whether a kernel may read there: device memory or pinned memory. Called by work, which runs
  // under the lock.
  bool KernelMayRead(uint64_t address, size_t bytes) const ABSL_NO_THREAD_SAFETY_ANALYSIS;
  void CheckNotCapturing(const char* call) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const size_t memory_max_;
  const std::string name_;
  const std::vector<std::string> peers_;
  SimulatedKernels kernels_;
  mutable Mutex mutex_;
  CondVar progress_;
  std::thread::id holder_ ABSL_GUARDED_BY(mutex_);  // none: nobody
  std::mt19937 random_ ABSL_GUARDED_BY(mutex_);
  const int eagerness_;  // of 8 chances to run something when work is added
  std::map<DeviceStream, std::unique_ptr<Stream>> streams_ ABSL_GUARDED_BY(mutex_);
  std::map<DeviceEvent, std::unique_ptr<Event>> events_ ABSL_GUARDED_BY(mutex_);
  std::map<uint64_t, size_t> memory_ ABSL_GUARDED_BY(mutex_);
  std::map<uint64_t, size_t> shared_ ABSL_GUARDED_BY(mutex_);     // mapped, of DeviceMemory
  std::map<uint64_t, size_t> peer_ ABSL_GUARDED_BY(mutex_);       // the same, of peers
  std::map<uint64_t, size_t> pinned_ ABSL_GUARDED_BY(mutex_);     // allocated
  std::map<uint64_t, size_t> pinned_by_ ABSL_GUARDED_BY(mutex_);  // by Pin
  size_t used_ ABSL_GUARDED_BY(mutex_) = 0;
  std::atomic<uint64_t> unpinned_copies_{0};
  std::atomic<uint64_t> fetched_from_host_{0};
};

}  // namespace crumb::client
