// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>

#include "client/gpu/device/device.h"
#include "common/mutex.h"

namespace crumb::client {

// CountingDevice wraps another device and counts its objects that were not returned. Thread-safe.
class CountingDevice final : public Device {
 public:
  explicit CountingDevice(std::shared_ptr<Device> device) : device_(std::move(device)) {}

  struct Live {
    size_t allocations = 0;
    size_t pinned_allocations = 0;
    size_t pinned_ranges = 0;
    size_t pinned_bytes = 0;  // the part of the allocated bytes that is pinned
    size_t streams = 0;
    size_t events = 0;

    friend bool operator==(const Live&, const Live&) = default;
    std::string ToString() const;
  };
  Live live() const;
  uint64_t pinned_ever() const;  // bytes

  absl::StatusOr<DeviceAddress> Allocate(size_t bytes) override;
  void Free(DeviceAddress address) override;
  absl::StatusOr<std::byte*> AllocatePinned(size_t bytes) override;
  void FreePinned(std::byte* bytes) override;
  absl::Status Pin(std::span<const std::byte> bytes, PinAccess access) override;
  void Unpin(std::span<const std::byte> bytes) override;
  absl::StatusOr<DeviceStream> NewStream() override;
  absl::StatusOr<DeviceStream> NewUrgentStream() override;
  void DeleteStream(DeviceStream stream) override;
  absl::StatusOr<DeviceEvent> NewEvent() override;
  void DeleteEvent(DeviceEvent event) override;

  absl::Status Record(DeviceEvent event, DeviceStream stream) override {
    return device_->Record(event, stream);
  }
  absl::Status Wait(DeviceStream stream, DeviceEvent event) override {
    return device_->Wait(stream, event);
  }
  absl::StatusOr<bool> Done(DeviceEvent event) override { return device_->Done(event); }
  absl::Status Synchronize(DeviceEvent event) override { return device_->Synchronize(event); }
  absl::Status ToDevice(std::span<const DeviceCopy> copies, DeviceStream stream) override {
    return device_->ToDevice(copies, stream);
  }
  absl::Status ToHost(std::span<const DeviceCopy> copies, DeviceStream stream) override {
    return device_->ToHost(copies, stream);
  }
  absl::Status CopyRows(const DeviceRowsCopy& copy, DeviceStream stream) override {
    return device_->CopyRows(copy, stream);
  }
  absl::Status Clear(DeviceAddress address, size_t bytes, DeviceStream stream) override {
    return device_->Clear(address, bytes, stream);
  }
  DeviceKernels& kernels() override { return device_->kernels(); }
  bool kernels_read_pinned() const override { return device_->kernels_read_pinned(); }
  absl::StatusOr<std::unique_ptr<DeviceMemory>> OpenMemory() override {
    return device_->OpenMemory();
  }
  absl::StatusOr<std::unique_ptr<DeviceMemory>> OpenPeerMemory(int ordinal) override {
    return device_->OpenPeerMemory(ordinal);
  }

 private:
  const std::shared_ptr<Device> device_;
  mutable Mutex mutex_;
  Live live_ ABSL_GUARDED_BY(mutex_);
  uint64_t pinned_ever_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace crumb::client
