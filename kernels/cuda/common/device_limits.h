// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

namespace crumb::kernels::cuda {

// What a launch takes its device to have; 0: what the current one has. With other numbers a call is
// launched as on another device: {8, 108, 163 << 10} as on an A100, {12, 0, 99 << 10} as on one of
// compute capability 12.0. The current one must have as much shared memory, and the instructions.
struct DeviceLimits {
  int major = 0;         // of the compute capability: below 9 there are no bulk copies
  int processors = 0;    // multiprocessors
  int shared_bytes = 0;  // shared memory of a block at most
};

// Sets what is 0.
cudaError_t CompleteLimits(DeviceLimits* limits);

}  // namespace crumb::kernels::cuda
