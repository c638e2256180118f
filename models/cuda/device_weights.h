// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/tile.h"
#include "models/config.h"
#include "models/weights.h"

namespace crumb::models::cuda {

// Maps an error of CUDA: kResourceExhausted if device memory is exhausted, otherwise kInternal. The
// message begins with `what`.
inline absl::Status FromCuda(cudaError_t error, const std::string& what) {
  if (error == cudaSuccess) return absl::OkStatus();
  const std::string message = what + ": " + cudaGetErrorString(error);
  return error == cudaErrorMemoryAllocation ? absl::ResourceExhaustedError(message)
                                            : absl::InternalError(message);
}

// Frees device memory; errors are ignored, because they belong to earlier work.
struct FreeDeviceMemory {
  void operator()(void* p) const { cudaFree(p); }
};
// An array in device memory. NewBuffer leaves its elements undefined, NewBufferOf copies them from
// the host.
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

// One decoder layer's weights in device memory, in bf16. Projections that read the same rows are
// one matrix.
struct DeviceLayerWeights {
  Buffer<kernels::Bf16> attention_norm;  // [hidden]
  Buffer<kernels::Bf16> qkv;             // [(q_heads + 2 kv_heads) * head_dim, hidden]
  Buffer<kernels::Bf16> q_norm, k_norm;  // [head_dim]
  Buffer<kernels::Bf16> out;             // [hidden, q_heads * head_dim]
  Buffer<kernels::Bf16> mlp_norm;        // [hidden]
  Buffer<kernels::Bf16> gate_up;         // [2 intermediate, hidden]
  Buffer<kernels::Bf16> down;            // [hidden, intermediate]
};

struct DeviceWeights {
  // Copies weights to the current device. kResourceExhausted: device memory is exhausted.
  static absl::StatusOr<DeviceWeights> Copy(const Weights& weights);

  const kernels::Bf16* output() const { return output_proj ? output_proj.get() : embedding.get(); }

  Buffer<kernels::Bf16> embedding;  // [vocab, hidden]
  std::vector<DeviceLayerWeights> layers;
  Buffer<kernels::Bf16> final_norm;   // [hidden]
  Buffer<kernels::Bf16> output_proj;  // [vocab, hidden], null when tied to the embedding
};

}  // namespace crumb::models::cuda
