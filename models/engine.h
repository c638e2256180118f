// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "models/config.h"
#include "models/kv_cache.h"
#include "models/logits.h"
#include "models/rope.h"
#include "models/thread_pool.h"
#include "models/weights.h"

namespace crumb::models {

// The checks of every engine, here and in models/cuda/, which run before a cache is changed. They
// return kInvalidArgument with a message for the caller.

absl::Status CheckChunkTokens(int chunk_tokens);

// Checks `tokens` at positions `length` and on: there is at least one, and all are within the
// vocabulary and the positions of the model.
absl::Status CheckForwardInput(const ModelConfig& config, int length,
                               std::span<const int32_t> tokens);

enum class LogitRows {
  kLast,  // the logits of the last token
  kAll,   // the logits of every token: rows * vocab_size floats
};

struct EngineOptions {
  int threads = 0;             // threads of the engine's own pool; 0: one per CPU
  ThreadPool* pool = nullptr;  // used instead of an own pool; must outlive the engine
  // Tokens that pass through all layers together. It bounds the scratch memory of a long prompt to
  // about chunk_tokens * (4 * hidden + 3 * intermediate + 4 * q_heads * head_dim) floats.
  int chunk_tokens = 512;
};

// A model of the Llama, Qwen2 or Qwen3 family: RMS norms, rotary positions, grouped queries,
// SwiGLU; with the norms of queries and keys and the biases that its configuration names. Weights
// are used as stored and everything is computed in f32; q, k and v are rounded to bf16 before they
// reach the cache, so that a BF16 cache holds the same rows as the published model's.
//
// Immutable after Load. Several threads may call Forward with different caches; their loops then
// run on the pool one after the other.
class Engine {
 public:
  // Reads config.json and the weights of an HF directory. Returns the errors of LoadModelConfig and
  // Weights::Load.
  static absl::StatusOr<std::unique_ptr<Engine>> Load(const std::string& dir,
                                                      const EngineOptions& options);

  const ModelConfig& config() const { return config_; }
  // The pool on which a KvCache may run its loops. REQUIRES: it is not used inside such a loop.
  ThreadPool& pool() const { return *pool_; }

  // Runs `tokens` through the model at positions cache.length() and on, in chunks of at most
  // chunk_tokens, and adds them to `cache`. The chunk size changes the result by f32 rounding only.
  // kInvalidArgument: there are no tokens, an id is outside the vocabulary, or there are more
  // positions than the model has; the cache is unchanged then. An error of the cache is returned;
  // complete chunks before it are in the cache.
  absl::StatusOr<Logits> Forward(KvCache& cache, std::span<const int32_t> tokens,
                                 LogitRows rows) const;

 private:
  struct Scratch;

  Engine(const EngineOptions& options, ModelConfig config, Weights weights);

  // Runs one chunk through all layers, to scratch.hidden, and advances the cache.
  absl::Status ForwardChunk(KvCache& cache, std::span<const int32_t> tokens,
                            Scratch& scratch) const;
  // Add the output of a layer's attention, or of its MLP, to the residual stream scratch.hidden.
  absl::Status AttentionBlock(KvCache& cache, int layer, int tokens, Scratch& scratch) const;
  void MlpBlock(int layer, int tokens, Scratch& scratch) const;
  // Computes the logits of rows of the residual stream. hidden [rows, hidden_size], out [rows,
  // vocab_size]
  void WriteLogits(const float* hidden, int rows, Scratch& scratch, float* out) const;

  const ModelConfig config_;
  const int chunk_tokens_;
  const Weights weights_;
  const Rope rope_;
  std::unique_ptr<ThreadPool> own_pool_;
  ThreadPool* pool_;
};

}  // namespace crumb::models
