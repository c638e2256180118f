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

// SimulatedDevice is a device without a GPU. Work on a stream is queued and runs when a thread
// waits for it, or earlier, in an order between streams that is as adverse as the seed makes it:
// only the order within a stream and events are respected. A missing event, memory that is reused
// too early, or a pinned table that is overwritten before it was read thus gives wrong bits, as it
// may on a GPU. Memory is filled with NaN when it is allocated. Copies of memory that is not pinned
// take its present content, as CUDA's do, and are counted.
//
// Errors that a real device would reject or get wrong (an address outside its memory, a wait while
// a stream is captured) fail the running test. Thread-safe.
class SimulatedDevice final : public Device {
 public:
  // Devices with one `name`, in other processes too, are one device to DeviceMemory. The names of
  // its peers are those of OpenPeerMemory's ordinals.
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

  // Runs all work queued on one stream, and the work that it waits for.
  void Drain(DeviceStream stream);

  // Work enqueued on `stream` between BeginCapture and EndCapture is kept and not run; Launch
  // enqueues it.
  using Graph = std::shared_ptr<const std::vector<std::function<void()>>>;
  void BeginCapture(DeviceStream stream);
  Graph EndCapture(DeviceStream stream);
  void Launch(const Graph& graph, DeviceStream stream);

  // From now on waits of other threads run no work: they end when this thread's waits have run it,
  // or with ReleaseOthers.
  void HoldOthers();
  void ReleaseOthers();

  // All memory counts as pinned: copies of it are made when the queue reaches them.
  std::atomic<bool> everything_pinned{false};

  // Called before every copy to the host; may change the device's bytes.
  std::function<void(const DeviceCopy&)> before_copy_to_host;
  // Calls with at least this number of copies to the device fail before they enqueue any.
  std::atomic<size_t> copies_fail_from{SIZE_MAX};
  // Calls with more copies to the host than this number enqueue so many of them and fail.
  std::atomic<size_t> copies_to_host_max{SIZE_MAX};
  // From now on, every allocation and pinned allocation fails the test.
  std::atomic<bool> allocations_forbidden{false};

  size_t live_allocations() const;  // device and pinned
  size_t live_handles() const;      // streams and events
  size_t pinned_ranges() const;
  size_t shared_ranges() const;  // mapped pieces of shared memory, including those of peers
  uint64_t unpinned_copies() const { return unpinned_copies_.load(); }
  uint64_t fetched_from_host() const {
    return fetched_from_host_.load();
  }  // tiles read by a kernel

 private:
  struct Event {
    uint64_t recorded = 0;
    uint64_t completed = 0;
  };
  struct Operation {
    std::function<void()> run;
    const Event* awaited = nullptr;  // runs once `completed` is at least `ticket`
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
  // Runs the first work of a stream that may run. Returns false if no stream may.
  bool RunOne() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void RunUntil(const std::function<bool()>& done) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  Stream& Of(DeviceStream stream) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Returns whether all bytes are in one pinned range. Fails the test if only a part is, as CUDA
  // fails.
  bool Pinned(uint64_t address, size_t bytes) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void CheckOnDevice(DeviceAddress address, size_t bytes) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Returns whether a kernel may read there: device or pinned memory. Called by work, which runs
  // under the lock.
  bool KernelMayRead(uint64_t address, size_t bytes) const ABSL_NO_THREAD_SAFETY_ANALYSIS;
  void CheckNotCapturing(const char* call) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const size_t memory_max_;
  const std::string name_;
  const std::vector<std::string> peers_;
  SimulatedKernels kernels_;
  mutable Mutex mutex_;
  CondVar progress_;
  std::thread::id holder_ ABSL_GUARDED_BY(mutex_);  // default value: none
  std::mt19937 random_ ABSL_GUARDED_BY(mutex_);
  const int eagerness_;  // out of 8 chances to run something when work is added
  std::map<DeviceStream, std::unique_ptr<Stream>> streams_ ABSL_GUARDED_BY(mutex_);
  std::map<DeviceEvent, std::unique_ptr<Event>> events_ ABSL_GUARDED_BY(mutex_);
  std::map<uint64_t, size_t> memory_ ABSL_GUARDED_BY(mutex_);
  std::map<uint64_t, size_t> shared_ ABSL_GUARDED_BY(mutex_);     // mapped DeviceMemory
  std::map<uint64_t, size_t> peer_ ABSL_GUARDED_BY(mutex_);       // mapped DeviceMemory of peers
  std::map<uint64_t, size_t> pinned_ ABSL_GUARDED_BY(mutex_);     // allocated pinned memory
  std::map<uint64_t, size_t> pinned_by_ ABSL_GUARDED_BY(mutex_);  // memory pinned by Pin
  size_t used_ ABSL_GUARDED_BY(mutex_) = 0;
  std::atomic<uint64_t> unpinned_copies_{0};
  std::atomic<uint64_t> fetched_from_host_{0};
};

}  // namespace crumb::client
