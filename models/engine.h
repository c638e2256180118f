// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "absl/status/statusor.h"
#include "models/config.h"
#include "models/kv_cache.h"
#include "models/logits.h"
#include "models/rope.h"
#include "models/thread_pool.h"
#include "models/weights.h"

namespace crumb::models {

enum class LogitRows {
  kLast,  // the last token's only
  kAll,   // every token's; rows * vocab_size floats
};

struct EngineOptions {
  int threads = 0;             // of the engine's own pool; 0: one per CPU it may run on
  ThreadPool* pool = nullptr;  // used instead of an own one, and must outlive the engine
  // Tokens that go through all layers together. Bounds the scratch memory of a long prompt to about
  // chunk_tokens * (4 * hidden + 3 * intermediate + 4 * q_heads * head_dim) floats.
  int chunk_tokens = 512;
};

// A Qwen3-architecture model: RMS norms, QK-norm, rotary positions, grouped queries, SwiGLU.
// Weights are used as stored, everything is computed in f32; q, k and v are rounded to bf16 where
// they meet the cache, so a BF16 cache holds what the published model's would.
//
// Immutable after Load: Forward may be called from several threads with different caches, which
// then take turns on the pool.
class Engine {
 public:
  // Reads an HF directory: config.json and safetensors. Errors as LoadModelConfig and
  // Weights::Load.
  static absl::StatusOr<std::unique_ptr<Engine>> Load(const std::string& dir,
                                                      const EngineOptions& options);

  const ModelConfig& config() const { return config_; }
  // For the KvCache's own loops. Not from inside one of its loops.
  ThreadPool& pool() const { return *pool_; }

  // Runs `tokens` through the model at positions cache.length() and on, in chunks of at most
  // chunk_tokens, and adds them to `cache`. Chunks do not change the result beyond f32 rounding.
  // kInvalidArgument: no tokens, an id outside the vocabulary, or more positions than the model
  // has; the cache is untouched then. An error of the cache is passed on; whole chunks before it
  // are in the cache.
  absl::StatusOr<Logits> Forward(KvCache& cache, std::span<const int32_t> tokens,
                                 LogitRows rows) const;

 private:
  struct Scratch;

  Engine(const EngineOptions& options, ModelConfig config, Weights weights);

  absl::Status ForwardChunk(KvCache& cache, std::span<const int32_t> tokens,
                            Scratch& scratch) const;
  absl::Status AttentionBlock(KvCache& cache, int layer, int tokens, Scratch& scratch) const;
  void MlpBlock(int layer, int tokens, Scratch& scratch) const;
  void WriteLogits(const float* hidden, int rows, Scratch& scratch, float* out) const;

  const ModelConfig config_;
  const int chunk_tokens_;
  const Weights weights_;
  const Rope rope_;
  std::unique_ptr<ThreadPool> own_pool_;
  ThreadPool* pool_;
};

}  // namespace crumb::models
