// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "tests/client/gpu/counting_device.h"

#include <utility>

namespace crumb::client {

std::string CountingDevice::Live::ToString() const {
  return std::to_string(allocations) + " allocations, " + std::to_string(pinned_allocations) +
         " pinned ones, " + std::to_string(pinned_ranges) + " pinned ranges of " +
         std::to_string(pinned_bytes) + " bytes, " + std::to_string(streams) + " streams, " +
         std::to_string(events) + " events";
}

CountingDevice::Live CountingDevice::live() const {
  MutexLock lock(&mutex_);
  return live_;
}

uint64_t CountingDevice::pinned_ever() const {
  MutexLock lock(&mutex_);
  return pinned_ever_;
}

absl::StatusOr<DeviceAddress> CountingDevice::Allocate(size_t bytes) {
  auto made = device_->Allocate(bytes);
  MutexLock lock(&mutex_);
  if (made.ok()) ++live_.allocations;
  return made;
}

void CountingDevice::Free(DeviceAddress address) {
  device_->Free(address);
  MutexLock lock(&mutex_);
  --live_.allocations;
}

absl::StatusOr<std::byte*> CountingDevice::AllocatePinned(size_t bytes) {
  auto made = device_->AllocatePinned(bytes);
  MutexLock lock(&mutex_);
  if (made.ok()) ++live_.pinned_allocations;
  return made;
}

void CountingDevice::FreePinned(std::byte* bytes) {
  device_->FreePinned(bytes);
  MutexLock lock(&mutex_);
  --live_.pinned_allocations;
}

absl::Status CountingDevice::Pin(std::span<const std::byte> bytes, PinAccess access) {
  absl::Status pinned = device_->Pin(bytes, access);
  MutexLock lock(&mutex_);
  if (!pinned.ok()) return pinned;
  ++live_.pinned_ranges;
  live_.pinned_bytes += bytes.size();
  pinned_ever_ += bytes.size();
  return pinned;
}

void CountingDevice::Unpin(std::span<const std::byte> bytes) {
  device_->Unpin(bytes);
  MutexLock lock(&mutex_);
  --live_.pinned_ranges;
  live_.pinned_bytes -= bytes.size();
}

absl::StatusOr<DeviceStream> CountingDevice::NewStream() {
  auto made = device_->NewStream();
  MutexLock lock(&mutex_);
  if (made.ok()) ++live_.streams;
  return made;
}

absl::StatusOr<DeviceStream> CountingDevice::NewUrgentStream() {
  auto made = device_->NewUrgentStream();
  MutexLock lock(&mutex_);
  if (made.ok()) ++live_.streams;
  return made;
}

void CountingDevice::DeleteStream(DeviceStream stream) {
  device_->DeleteStream(stream);
  MutexLock lock(&mutex_);
  --live_.streams;
}

absl::StatusOr<DeviceEvent> CountingDevice::NewEvent() {
  auto made = device_->NewEvent();
  MutexLock lock(&mutex_);
  if (made.ok()) ++live_.events;
  return made;
}

void CountingDevice::DeleteEvent(DeviceEvent event) {
  device_->DeleteEvent(event);
  MutexLock lock(&mutex_);
  --live_.events;
}

}  // namespace crumb::client
