// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include <string>

#include "absl/status/status.h"

namespace crumb::client {

// Converts the result of the CUDA call that `what` names. It also clears the runtime's last error,
// which would otherwise be reported by a later launch.
//
// kResourceExhausted: no memory; kInvalidArgument: a size or launch configuration; kUnavailable: no
// device or driver; kAlreadyExists: memory is pinned already; kInternal: everything else, after
// which the device's context cannot be trusted.
inline absl::Status FromCuda(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return absl::OkStatus();
  cudaGetLastError();
  const std::string message = std::string(what) + ": " + cudaGetErrorString(error);
  switch (error) {
    case cudaErrorMemoryAllocation:
      return absl::ResourceExhaustedError(message);
    case cudaErrorHostMemoryAlreadyRegistered:
      return absl::AlreadyExistsError(message);
    case cudaErrorInvalidValue:
    case cudaErrorInvalidConfiguration:
      return absl::InvalidArgumentError(message);
    case cudaErrorNoDevice:
    case cudaErrorInvalidDevice:
    case cudaErrorInsufficientDriver:
    case cudaErrorSystemDriverMismatch:
      return absl::UnavailableError(message);
    default:
      return absl::InternalError(message);
  }
}

}  // namespace crumb::client
