// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "client/gpu/device/owned.h"

#include "common/status_macros.h"

namespace crumb::client {

absl::StatusOr<OwnedStream> NewStream(Device& device) {
  CRUMB_ASSIGN_OR_RETURN(DeviceStream stream, device.NewStream());
  return OwnedStream(device, stream);
}

absl::StatusOr<OwnedStream> NewUrgentStream(Device& device) {
  CRUMB_ASSIGN_OR_RETURN(DeviceStream stream, device.NewUrgentStream());
  return OwnedStream(device, stream);
}

absl::StatusOr<OwnedEvent> NewEvent(Device& device) {
  CRUMB_ASSIGN_OR_RETURN(DeviceEvent event, device.NewEvent());
  return OwnedEvent(device, event);
}

absl::StatusOr<DeviceBuffer> NewDeviceBuffer(Device& device, size_t bytes) {
  if (bytes == 0) return DeviceBuffer();
  CRUMB_ASSIGN_OR_RETURN(DeviceAddress address, device.Allocate(bytes));
  return DeviceBuffer(device, address);
}

absl::StatusOr<PinnedBuffer> NewPinnedBuffer(Device& device, size_t bytes) {
  if (bytes == 0) return PinnedBuffer();
  CRUMB_ASSIGN_OR_RETURN(std::byte * memory, device.AllocatePinned(bytes));
  return PinnedBuffer(device, memory);
}

}  // namespace crumb::client
