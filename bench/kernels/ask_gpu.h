// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include "bench/gpu_run.h"

namespace crumb::bench {

// Sets what `run` says of the device, the driver and CUDA.
cudaError_t AskGpu(int ordinal, GpuRun* run);

}  // namespace crumb::bench
