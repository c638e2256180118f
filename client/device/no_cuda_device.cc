// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "client/device/device.h"
#include "crumb/cuda_device.h"

namespace crumb::client {

void CloseDevice::operator()(Device* device) const { delete device; }

absl::StatusOr<OpenDevice> OpenCudaDevice(int) {
  return absl::FailedPreconditionError(
      "this program was built without CUDA: build it with CRUMB_CUDA=ON");
}

}  // namespace crumb::client
