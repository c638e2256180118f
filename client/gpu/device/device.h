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

// What the device may do with pinned memory.
enum class PinAccess { kRead, kReadWrite };

// `bytes` bytes from one place to another; one of both is a host address.
struct DeviceCopy {
  uint64_t to = 0;
  uint64_t from = 0;
  size_t bytes = 0;
};

// Rows inside device memory: row i goes from from + i * from_pitch to to + i * to_pitch.
struct DeviceRowsCopy {
  DeviceAddress to = 0;
  size_t to_pitch = 0;
  DeviceAddress from = 0;
  size_t from_pitch = 0;
  size_t row_bytes = 0;
  size_t rows = 0;
};

// Device memory, streams, events and copies: what the client needs of one GPU. Calls that take a
// stream enqueue only: they return before the work is done, in the stream's order. Nothing orders
// two streams but events. Host memory that a queued copy reads or writes must stay as it is until
// the copy is done, and should be pinned: a copy of other memory may block.
//
// Thread-safe; a stream is used by one thread at a time. Codes: kResourceExhausted no memory;
// kInternal the device failed, nothing on it can be trusted any more.
class Device {
 public:
  virtual ~Device() = default;
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;

  // Uninitialised, 512-byte aligned. Free blocks until the device has finished with it.
  virtual absl::StatusOr<DeviceAddress> Allocate(size_t bytes) = 0;
  virtual void Free(DeviceAddress address) = 0;
  virtual absl::StatusOr<std::byte*> AllocatePinned(size_t bytes) = 0;
  virtual void FreePinned(std::byte* bytes) = 0;
  // Pins whole memory pages of this process, so that copies of them are asynchronous. Blocks while
  // it faults them in. Read-only mappings are pinned with kRead. kResourceExhausted: the limit of
  // locked memory; kAlreadyExists: some of it is pinned already, by whomever.
  virtual absl::Status Pin(std::span<const std::byte> bytes, PinAccess access) = 0;
  virtual void Unpin(std::span<const std::byte> bytes) = 0;

  virtual absl::StatusOr<DeviceStream> NewStream() = 0;
  // One whose kernels come first where those of other streams wait too.
  virtual absl::StatusOr<DeviceStream> NewUrgentStream() = 0;
  virtual void DeleteStream(DeviceStream stream) = 0;
  virtual absl::StatusOr<DeviceEvent> NewEvent() = 0;
  virtual void DeleteEvent(DeviceEvent event) = 0;

  // The event stands for what was enqueued on `stream` so far, and for nothing else any more.
  virtual absl::Status Record(DeviceEvent event, DeviceStream stream) = 0;
  // What is enqueued on `stream` from now on runs after the event's latest Record so far; at once
  // when there was none.
  virtual absl::Status Wait(DeviceStream stream, DeviceEvent event) = 0;
  virtual absl::StatusOr<bool> Done(DeviceEvent event) = 0;
  // Blocks, asleep, until the event is done.
  virtual absl::Status Synchronize(DeviceEvent event) = 0;

  // Copies of one call may be made in any order.
  virtual absl::Status ToDevice(std::span<const DeviceCopy> copies, DeviceStream stream) = 0;
  virtual absl::Status ToHost(std::span<const DeviceCopy> copies, DeviceStream stream) = 0;
  virtual absl::Status CopyRows(const DeviceRowsCopy& copy, DeviceStream stream) = 0;
  // Sets bytes to zero.
  virtual absl::Status Clear(DeviceAddress address, size_t bytes, DeviceStream stream) = 0;

  virtual DeviceKernels& kernels() = 0;
  // Whether they read pinned host memory at its own address.
  virtual bool kernels_read_pinned() const = 0;

  // Memory of this device that can be shared with other processes. What is mapped of it is this
  // device's as what Allocate gives. kFailedPrecondition: there is none.
  virtual absl::StatusOr<std::unique_ptr<DeviceMemory>> OpenMemory() = 0;
  // Memory of peer `ordinal`, under the peer's name, mapped so that this device reads it: copies
  // come from there as from the host. Allocates nothing. kUnavailable: no such peer;
  // kFailedPrecondition: this device does not reach it.
  virtual absl::StatusOr<std::unique_ptr<DeviceMemory>> OpenPeerMemory(int ordinal) = 0;

 protected:
  Device() = default;
};

}  // namespace crumb::client
