// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

namespace crumb::kernels::cuda {

// The limits of a device that determine a launch's configuration. A member that is 0 stands for the
// current device's value. Tests set the limits of other GPUs to exercise their configurations, such
// as {8, 108, 163 << 10} of an A100 and {12, 0, 99 << 10} of compute capability 12.0. REQUIRES: the
// current device has as much shared memory, and the instructions of that compute capability.
struct DeviceLimits {
  int major = 0;         // major compute capability; below 9 there are no bulk copies
  int processors = 0;    // SMs
  int shared_bytes = 0;  // shared memory that a block can have, opt-in included
};

// Replaces members that are 0 by the current device's values. Returns the error of the CUDA
// runtime.
cudaError_t CompleteLimits(DeviceLimits* limits);

}  // namespace crumb::kernels::cuda
