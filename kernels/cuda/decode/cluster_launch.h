// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "kernels/cuda/decode/kernel_params.h"
#include "kernels/cuda/decode/plan.h"

// The cluster form of decode attention: every (sequence, KV head) has a cluster of blocks, or
// several, that share its tokens evenly and exchange sums through each other's shared memory. How
// many, the plan says or, without one, the grid. docs/kernels/decode.md has the schedule. Inside
// the CUDA back end only.
namespace crumb::kernels::cuda {

// Whether and how a shape is served by clusters on the current device: sets launch->cluster, and
// leaves it empty where the other form is taken; where the plan decides, blocks and shared memory
// are made to serve both. The rest of `launch` is set. The choice depends on the device and on the
// shape's sizes alone. cudaErrorInvalidValue: clusters are asked for, and do not serve the shape.
cudaError_t ChooseClusters(const DecodeShape& shape, DecodeForm form, const DeviceLimits& limits,
                           DecodeLaunch* launch);

// Enqueues the kernel of a launch with clusters.
cudaError_t LaunchClusters(const DecodeKernelParams& k, cudaStream_t stream);

using DecodeKernelPointer = void (*)(const DecodeKernelParams);
// The kernel that holds both forms and asks the plan which; up to 16 columns.
DecodeKernelPointer FindEitherKernel(int columns);

}  // namespace crumb::kernels::cuda
