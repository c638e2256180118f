// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/cuda/common/ptx.cuh"

// Launches of kernels that may start while the previous kernel in the stream ends (programmatic
// dependent launch, compute capability 9.0).
namespace crumb::models::cuda {

// Lets the next kernel start, and waits until the previous one has ended and its writes are
// visible.
__device__ __forceinline__ void WaitForPrevious() {
#if __CUDA_ARCH__ >= 900
  kernels::cuda::ptx::LaunchDependents();
  kernels::cuda::ptx::WaitForPrevious();
#endif
}

template <typename... Parameters, typename... Arguments>
cudaError_t LaunchWithShared(void (*kernel)(Parameters...), dim3 grid, int threads,
                             size_t shared_bytes, cudaStream_t stream, Arguments... arguments) {
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  cudaLaunchAttribute overlap = {};
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &overlap;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, static_cast<Parameters>(arguments)...);
}

template <typename... Parameters, typename... Arguments>
cudaError_t Launch(void (*kernel)(Parameters...), dim3 grid, int threads, cudaStream_t stream,
                   Arguments... arguments) {
  return LaunchWithShared(kernel, grid, threads, 0, stream, arguments...);
}

}  // namespace crumb::models::cuda
