// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "absl/status/statusor.h"
#include "models/config.h"
#include "models/cuda/device_kv_cache.h"
#include "models/engine.h"
#include "models/logits.h"

namespace crumb::models::cuda {

struct EngineOptions {
  int device = 0;          // a CUDA ordinal
  int chunk_tokens = 512;  // tokens that go through all layers together
};

// models::Engine on a GPU: the same models, with activations in bf16 between kernels and sums in
// fp32; projections by cuBLAS, those of few rows by chains (product_chain.h). Serves head_dim 128
// and projections without biases. Weights are copied to the device, f32 ones rounded to bf16. Not
// thread-safe.
class Engine {
 public:
  // Reads an HF directory. kUnavailable: no driver, no such device, or no cuBLAS;
  // kInvalidArgument: a model that is not served; kResourceExhausted: device memory; others as
  // models::Engine::Load.
  static absl::StatusOr<std::unique_ptr<Engine>> Load(const std::string& dir,
                                                      const EngineOptions& options);
  virtual ~Engine() = default;
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  virtual const ModelConfig& config() const = 0;
  // Everything runs on it, the caches' part too.
  virtual cudaStream_t stream() const = 0;

  // Runs `tokens` through the model at positions cache.length() and on, and adds them to `cache`.
  // Waits for the logits. kInvalidArgument as models::Engine::Forward; an error of the cache is
  // passed on, whole chunks before it are in the cache; kInternal: the device failed.
  virtual absl::StatusOr<Logits> Forward(DeviceKvCache& cache, std::span<const int32_t> tokens,
                                         LogitRows rows) = 0;

 protected:
  Engine() = default;
};

}  // namespace crumb::models::cuda
