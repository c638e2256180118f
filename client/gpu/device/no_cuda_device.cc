// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "client/gpu/device/device.h"
#include "client/gpu/device/device_memory.h"
#include "crumb/device_worker.h"

namespace crumb::client {

void CloseDevice::operator()(Device* device) const { delete device; }

namespace {

absl::Status WithoutCuda() {
  return absl::FailedPreconditionError(
      "this program was built without CUDA: build it with CRUMB_CUDA=ON");
}

}  // namespace

absl::StatusOr<OpenDevice> OpenCudaDevice(int) { return WithoutCuda(); }

absl::StatusOr<std::unique_ptr<DeviceMemory>> DeviceMemory::OpenCuda(int) { return WithoutCuda(); }

absl::StatusOr<std::unique_ptr<DeviceMemory>> DeviceMemory::OpenCudaPeer(int, int) {
  return WithoutCuda();
}

}  // namespace crumb::client
