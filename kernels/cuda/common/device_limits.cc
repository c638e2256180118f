// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/common/device_limits.h"

namespace crumb::kernels::cuda {

cudaError_t CompleteLimits(DeviceLimits* limits) {
  int device = 0;
  cudaError_t error = cudaGetDevice(&device);
  const auto complete = [&](int* value, cudaDeviceAttr attribute) {
    if (error == cudaSuccess && *value == 0) {
      error = cudaDeviceGetAttribute(value, attribute, device);
    }
  };
  complete(&limits->major, cudaDevAttrComputeCapabilityMajor);
  complete(&limits->processors, cudaDevAttrMultiProcessorCount);
  complete(&limits->shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin);
  return error;
}

}  // namespace crumb::kernels::cuda
