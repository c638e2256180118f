// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>

#include "absl/status/statusor.h"

namespace crumb::client {

class Device;

// Destroys what OpenCudaDevice made.
struct CloseDevice {
  void operator()(Device* device) const;
};
using OpenDevice = std::unique_ptr<Device, CloseDevice>;

// CUDA device `ordinal` for DeviceWorker::Open, by the CUDA runtime of this process: an engine's
// streams and pointers can be used with it. Threads keep the current device they had.
// kUnavailable: no driver or no such device; kFailedPrecondition: the program was built without
// CUDA (CRUMB_CUDA=OFF).
absl::StatusOr<OpenDevice> OpenCudaDevice(int ordinal);

}  // namespace crumb::client
