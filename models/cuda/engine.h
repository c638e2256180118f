// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/tile.h"
#include "models/config.h"
#include "models/engine.h"
#include "models/logits.h"

namespace crumb::models::cuda {

// The keys and values of one sequence in device memory: models::KvCache with device pointers. A
// forward pass calls Start, for every layer Append and then Attend, and Advance. All functions
// except Advance only enqueue work on the engine's stream. Not thread-safe.
class DeviceKvCache {
 public:
  virtual ~DeviceKvCache() = default;

  // The number of tokens whose keys and values are held, which is the position of the next token.
  virtual int length() const = 0;
  // The most tokens of the next pass; at least 1.
  virtual int pass_tokens_max() const = 0;

  virtual absl::Status Start(int tokens) = 0;
  // Adds the rows of one layer, which Attend of the layer may still read.
  //   k, v  device [tokens, kv_heads, head_dim] bf16, after QK-norm and RoPE
  virtual absl::Status Append(int layer, const kernels::Bf16* k, const kernels::Bf16* v) = 0;
  // Computes causal attention of the pass's tokens with scale 1 / sqrt(head_dim).
  //   q, out  device [tokens, q_heads, head_dim] bf16
  virtual absl::Status Attend(int layer, const kernels::Bf16* q, kernels::Bf16* out) = 0;
  // Ends the pass: from now on `tokens`, as many as were passed to Start, are part of the sequence.
  virtual absl::Status Advance(std::span<const int32_t> tokens) = 0;
};

// The device, and the bound on a pass's activations.
struct EngineOptions {
  int device = 0;          // a CUDA ordinal
  int chunk_tokens = 512;  // tokens that go through all layers together
};

// models::Engine on a GPU. It serves the same models with head_dim 128 and without biases.
// Activations are bf16 between kernels and sums fp32; cuBLAS computes projections, chains those of
// few rows (product_chain.h). Weights are copied to the device and rounded to bf16. Not
// thread-safe.
class Engine {
 public:
  // Reads an HF directory. kUnavailable: there is no driver, no such device, or no cuBLAS;
  // kInvalidArgument: the model is not served; kResourceExhausted: device memory is exhausted;
  // other errors are those of models::Engine::Load.
  static absl::StatusOr<std::unique_ptr<Engine>> Load(const std::string& dir,
                                                      const EngineOptions& options);
  virtual ~Engine() = default;
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  virtual const ModelConfig& config() const = 0;
  // The stream of all work, including that of caches.
  virtual cudaStream_t stream() const = 0;

  // Runs `tokens` through the model at positions cache.length() and on, adds them to `cache`, and
  // waits for the logits. kInvalidArgument as in models::Engine::Forward; kInternal: the device
  // failed. An error of the cache is returned; complete chunks before it are in the cache.
  virtual absl::StatusOr<Logits> Forward(DeviceKvCache& cache, std::span<const int32_t> tokens,
                                         LogitRows rows) = 0;

 protected:
  Engine() = default;
};

}  // namespace crumb::models::cuda
