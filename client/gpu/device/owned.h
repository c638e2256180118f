// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <utility>

#include "absl/status/statusor.h"
#include "client/gpu/device/device.h"

namespace crumb::client {

// Owned holds an object that a Device created, and returns it to the device on destruction.
// Move-only. It must not outlive the device.
template <typename Handle, void (Device::*kGiveBack)(Handle)>
class Owned {
 public:
  Owned() = default;
  Owned(Device& device, Handle handle) : device_(&device), handle_(handle) {}
  Owned(Owned&& other) noexcept
      : device_(std::exchange(other.device_, nullptr)),
        handle_(std::exchange(other.handle_, Handle{})) {}
  Owned& operator=(Owned&& other) noexcept {
    std::swap(device_, other.device_);
    std::swap(handle_, other.handle_);
    return *this;
  }
  ~Owned() {
    if (device_ != nullptr) (device_->*kGiveBack)(handle_);
  }
  // Returns the object, which stays owned; zero or null if there is none.
  Handle get() const { return handle_; }

 private:
  Device* device_ = nullptr;
  Handle handle_{};
};

using OwnedStream = Owned<DeviceStream, &Device::DeleteStream>;
using OwnedEvent = Owned<DeviceEvent, &Device::DeleteEvent>;
using DeviceBuffer = Owned<DeviceAddress, &Device::Free>;
using PinnedBuffer = Owned<std::byte*, &Device::FreePinned>;

// Each returns an owned object of the device's function of that name. A buffer of 0 bytes is not
// allocated.
absl::StatusOr<OwnedStream> NewStream(Device& device);
absl::StatusOr<OwnedStream> NewUrgentStream(Device& device);
absl::StatusOr<OwnedEvent> NewEvent(Device& device);
absl::StatusOr<DeviceBuffer> NewDeviceBuffer(Device& device, size_t bytes);
absl::StatusOr<PinnedBuffer> NewPinnedBuffer(Device& device, size_t bytes);

}  // namespace crumb::client
