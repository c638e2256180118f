// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <memory>
#include <span>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

// Device memory of the CUDA engine.
namespace crumb::models::cuda {

// kResourceExhausted: out of memory; kInternal: anything else. `what` begins the message.
inline absl::Status FromCuda(cudaError_t error, const std::string& what) {
  if (error == cudaSuccess) return absl::OkStatus();
  const std::string message = what + ": " + cudaGetErrorString(error);
  return error == cudaErrorMemoryAllocation ? absl::ResourceExhaustedError(message)
                                            : absl::InternalError(message);
}

struct FreeDeviceMemory {
  void operator()(void* p) const { cudaFree(p); }
};
template <typename T>
using Buffer = std::unique_ptr<T, FreeDeviceMemory>;

template <typename T>
absl::StatusOr<Buffer<T>> NewBuffer(size_t count) {
  void* p = nullptr;
  const absl::Status status =
      FromCuda(cudaMalloc(&p, count * sizeof(T)),
               "allocating " + std::to_string(count * sizeof(T)) + " bytes of device memory");
  if (!status.ok()) return status;
  return Buffer<T>(static_cast<T*>(p));
}

template <typename T>
absl::StatusOr<Buffer<T>> NewBufferOf(std::span<const T> host) {
  absl::StatusOr<Buffer<T>> buffer = NewBuffer<T>(host.size());
  if (!buffer.ok()) return buffer;
  const absl::Status status =
      FromCuda(cudaMemcpy(buffer->get(), host.data(), host.size_bytes(), cudaMemcpyHostToDevice),
               "copying to device memory");
  if (!status.ok()) return status;
  return buffer;
}

}  // namespace crumb::models::cuda
