// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/gpu/device/device_kernels.h"
#include "client/gpu/device/device_memory.h"
#include "crumb/device_options.h"

namespace crumb::client {

using DeviceEvent = struct DeviceEventHandle*;

// PinAccess is the access that a device has to pinned memory.
enum class PinAccess { kRead, kReadWrite };

// A copy of `bytes` bytes between device and host; one of the addresses is a host address.
struct DeviceCopy {
  uint64_t to = 0;
  uint64_t from = 0;
  size_t bytes = 0;
};

// A copy of rows inside device memory: row i goes from `from` + i * from_pitch to `to` + i *
// to_pitch.
struct DeviceRowsCopy {
  DeviceAddress to = 0;
  size_t to_pitch = 0;
  DeviceAddress from = 0;
  size_t from_pitch = 0;
  size_t row_bytes = 0;
  size_t rows = 0;
};

// Device is the client's interface to one GPU: memory, streams, events, copies and kernels. Calls
// that take a stream only enqueue: they return before the work is done, which runs in the stream's
// order. Only events order two streams. Host memory that a queued copy reads or writes must not
// change until the copy is done. It should be pinned, because a copy of other memory may block.
//
// Thread-safe, but a stream is used by one thread at a time. Codes: kResourceExhausted: there is no
// memory; kInternal: the device failed, and nothing on it can be trusted any more.
//
// Two implementations: CudaDevice, and a simulated device of the tests that runs streams in
// adversarial order and computes kernels on the CPU. Everything that a device created (memory,
// streams, events) must be returned to it before it is destroyed; owned.h has types that do so.
class Device {
 public:
  virtual ~Device() = default;
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;

  // Allocates uninitialized memory, aligned to 512 bytes. Free blocks until the device has finished
  // with the memory.
  virtual absl::StatusOr<DeviceAddress> Allocate(size_t bytes) = 0;
  virtual void Free(DeviceAddress address) = 0;
  // Allocates host memory that is pinned, and by which copies are asynchronous.
  virtual absl::StatusOr<std::byte*> AllocatePinned(size_t bytes) = 0;
  virtual void FreePinned(std::byte* bytes) = 0;
  // Pins whole memory pages of this process, so that copies of them are asynchronous. Blocks while
  // it faults them in. Read-only mappings are pinned with kRead. kResourceExhausted: the limit of
  // locked memory is reached; kAlreadyExists: some of it is pinned already.
  virtual absl::Status Pin(std::span<const std::byte> bytes, PinAccess access) = 0;
  // Ends a Pin of the same bytes. REQUIRES: no queued copy uses them.
  virtual void Unpin(std::span<const std::byte> bytes) = 0;

  // Creates a stream. Streams run beside each other unless an event orders them.
  virtual absl::StatusOr<DeviceStream> NewStream() = 0;
  // Creates a stream whose kernels run before waiting kernels of other streams.
  virtual absl::StatusOr<DeviceStream> NewUrgentStream() = 0;
  virtual void DeleteStream(DeviceStream stream) = 0;
  // Creates an event, which is done until its first Record.
  virtual absl::StatusOr<DeviceEvent> NewEvent() = 0;
  virtual void DeleteEvent(DeviceEvent event) = 0;

  // Makes the event stand for the work enqueued on `stream` so far.
  virtual absl::Status Record(DeviceEvent event, DeviceStream stream) = 0;
  // Makes work enqueued on `stream` from now on wait for the event's latest Record; it waits for
  // nothing if there was none.
  virtual absl::Status Wait(DeviceStream stream, DeviceEvent event) = 0;
  // Returns whether the work of the event's latest Record is done. Does not block.
  virtual absl::StatusOr<bool> Done(DeviceEvent event) = 0;
  // Sleeps until the event is done.
  virtual absl::Status Synchronize(DeviceEvent event) = 0;

  // Copies of one call may be made in any order.
  virtual absl::Status ToDevice(std::span<const DeviceCopy> copies, DeviceStream stream) = 0;
  virtual absl::Status ToHost(std::span<const DeviceCopy> copies, DeviceStream stream) = 0;
  // Copies rows inside device memory, for example between rings of different capacity.
  virtual absl::Status CopyRows(const DeviceRowsCopy& copy, DeviceStream stream) = 0;
  // Sets bytes to zero.
  virtual absl::Status Clear(DeviceAddress address, size_t bytes, DeviceStream stream) = 0;

  // Returns the kernels of this device, which live as long as it.
  virtual DeviceKernels& kernels() = 0;
  // Returns whether kernels can read pinned host memory at its host address.
  virtual bool kernels_read_pinned() const = 0;

  // Opens memory of this device that can be passed to other processes. Mapped ranges are used like
  // memory of Allocate. kFailedPrecondition: the device does not support it.
  virtual absl::StatusOr<std::unique_ptr<DeviceMemory>> OpenMemory() = 0;
  // Opens memory of peer `ordinal`, with the peer's uuid, mapped so that this device can read it:
  // copies from it are made as from the host. Allocates nothing. kUnavailable: there is no such
  // peer; kFailedPrecondition: this device does not reach it.
  virtual absl::StatusOr<std::unique_ptr<DeviceMemory>> OpenPeerMemory(int ordinal) = 0;

 protected:
  Device() = default;
};

}  // namespace crumb::client
