// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "models/engine.h"

#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/status_macros.h"
#include "kernels/bf16.h"

namespace crumb::models {

absl::Status CheckChunkTokens(int chunk_tokens) {
  if (chunk_tokens >= 1) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("chunk_tokens must be at least 1, it is ", chunk_tokens));
}

absl::Status CheckForwardInput(const ModelConfig& config, int length,
                               std::span<const int32_t> tokens) {
  if (tokens.empty())
    return absl::InvalidArgumentError("there are no tokens to run through the model");
  const int64_t positions = int64_t{length} + static_cast<int64_t>(tokens.size());
  if (positions > config.max_positions) {
    return absl::InvalidArgumentError(absl::StrCat("a sequence of ", positions,
                                                   " tokens, the model has ", config.max_positions,
                                                   " positions"));
  }
  for (const int32_t token : tokens) {
    if (token < 0 || token >= config.vocab_size) {
      return absl::InvalidArgumentError(
          absl::StrCat("token ", token, " is outside the vocabulary of ", config.vocab_size));
    }
  }
  return absl::OkStatus();
}

namespace {

// Token rows of one task of an element-wise loop.
constexpr int kRowsPerTask = 16;

// Calls body(row) for every row < rows.
template <typename Body>
void ForRows(ThreadPool& pool, int rows, const Body& body) {
  pool.ParallelFor((rows + kRowsPerTask - 1) / kRowsPerTask, [&](int task) {
    const int end = std::min(rows, (task + 1) * kRowsPerTask);
    for (int row = task * kRowsPerTask; row < end; ++row) body(row);
  });
}

// Computes to = from / rms(from) * weight; `to` may be `from`.
void RmsNorm(const float* from, const std::vector<float>& weight, float eps, float* to) {
  const size_t size = weight.size();
  float squares = 0.0f;
  for (size_t i = 0; i < size; ++i) squares += from[i] * from[i];
  const float scale = 1.0f / std::sqrt(squares / static_cast<float>(size) + eps);
  for (size_t i = 0; i < size; ++i) to[i] = from[i] * scale * weight[i];
}

// Adds a projection's bias, which may be empty, to one row.
void AddBias(const std::vector<float>& bias, float* row) {
  for (size_t c = 0; c < bias.size(); ++c) row[c] += bias[c];
}

void RoundToBf16(const float* from, size_t count, kernels::Bf16* to) {
  for (size_t i = 0; i < count; ++i) to[i] = kernels::Bf16FromFloat(from[i]);
}

}  // namespace

// The activations of one chunk, one row per token.
struct Engine::Scratch {
  Scratch(const ModelConfig& config, int tokens)
      : hidden(size_t{1} * tokens * config.hidden_size),
        normed(hidden.size()),
        delta(hidden.size()),
        q(size_t{1} * tokens * config.q_heads * config.head_dim),
        k(size_t{1} * tokens * config.kv_heads * config.head_dim),
        v(k.size()),
        attended(q.size()),
        q_bf16(q.size()),
        k_bf16(k.size()),
        v_bf16(k.size()),
        gate(size_t{1} * tokens * config.intermediate_size),
        up(gate.size()),
        cosine(size_t{1} * tokens * config.head_dim / 2),
        sine(cosine.size()) {}

  std::vector<float> hidden;  // the residual stream
  std::vector<float> normed;
  std::vector<float> delta;  // the output of a block, which is added to the stream
  std::vector<float> q, k, v, attended;
  std::vector<kernels::Bf16> q_bf16, k_bf16, v_bf16;
  std::vector<float> gate, up;
  std::vector<float> cosine, sine;  // [tokens, head_dim / 2]
};

absl::StatusOr<std::unique_ptr<Engine>> Engine::Load(const std::string& dir,
                                                     const EngineOptions& options) {
  CRUMB_RETURN_IF_ERROR(CheckChunkTokens(options.chunk_tokens));
  CRUMB_ASSIGN_OR_RETURN(ModelConfig config, LoadModelConfig(dir));
  CRUMB_ASSIGN_OR_RETURN(Weights weights, Weights::Load(dir, config));
  return std::unique_ptr<Engine>(new Engine(options, std::move(config), std::move(weights)));
}

Engine::Engine(const EngineOptions& options, ModelConfig config, Weights weights)
    : config_(std::move(config)),
      chunk_tokens_(options.chunk_tokens),
      weights_(std::move(weights)),
      rope_(config_.rope, config_.head_dim),
      own_pool_(options.pool == nullptr ? std::make_unique<ThreadPool>(options.threads) : nullptr),
      pool_(options.pool == nullptr ? own_pool_.get() : options.pool) {}

absl::StatusOr<Logits> Engine::Forward(KvCache& cache, std::span<const int32_t> tokens,
                                       LogitRows rows) const {
  CRUMB_RETURN_IF_ERROR(CheckForwardInput(config_, cache.length(), tokens));
  const int total = static_cast<int>(tokens.size());
  Scratch scratch(config_, std::min(total, chunk_tokens_));
  Logits logits;
  logits.rows = rows == LogitRows::kAll ? total : 1;
  logits.vocab_size = config_.vocab_size;
  logits.values.resize(size_t{1} * logits.rows * config_.vocab_size);
  for (int begin = 0; begin < total; begin += chunk_tokens_) {
    const int count = std::min(chunk_tokens_, total - begin);
    CRUMB_RETURN_IF_ERROR(ForwardChunk(cache, tokens.subspan(begin, count), scratch));
    if (rows == LogitRows::kAll) {
      WriteLogits(scratch.hidden.data(), count, scratch,
                  logits.values.data() + size_t{1} * begin * config_.vocab_size);
    } else if (begin + count == total) {
      WriteLogits(scratch.hidden.data() + size_t{1} * (count - 1) * config_.hidden_size, 1, scratch,
                  logits.values.data());
    }
  }
  return logits;
}

absl::Status Engine::ForwardChunk(KvCache& cache, std::span<const int32_t> tokens,
                                  Scratch& scratch) const {
  const int count = static_cast<int>(tokens.size());
  const int position = cache.length();
  const int half = config_.head_dim / 2;
  const Matrix& embedding = weights_.embedding;
  ForRows(*pool_, count, [&](int i) {
    ActiveMatmulKernels().widen(embedding.dtype(), embedding.row(tokens[i]), config_.hidden_size,
                                scratch.hidden.data() + size_t{1} * i * config_.hidden_size);
    rope_.At(position + i, scratch.cosine.data() + size_t{1} * i * half,
             scratch.sine.data() + size_t{1} * i * half);
  });
  for (int layer = 0; layer < config_.layers; ++layer) {
    CRUMB_RETURN_IF_ERROR(AttentionBlock(cache, layer, count, scratch));
    MlpBlock(layer, count, scratch);
  }
  return cache.Advance(tokens);
}

absl::Status Engine::AttentionBlock(KvCache& cache, int layer, int tokens, Scratch& scratch) const {
  const LayerWeights& weights = weights_.layers[layer];
  const size_t hidden = config_.hidden_size;
  const size_t head_dim = config_.head_dim;
  const size_t q_size = config_.q_heads * head_dim;
  const size_t kv_size = config_.kv_heads * head_dim;
  ForRows(*pool_, tokens, [&](int i) {
    RmsNorm(scratch.hidden.data() + i * hidden, weights.attention_norm, config_.rms_norm_eps,
            scratch.normed.data() + i * hidden);
  });
  Multiply(weights.q_proj, tokens, scratch.normed.data(), scratch.q.data(), *pool_);
  Multiply(weights.k_proj, tokens, scratch.normed.data(), scratch.k.data(), *pool_);
  Multiply(weights.v_proj, tokens, scratch.normed.data(), scratch.v.data(), *pool_);

  ForRows(*pool_, tokens, [&](int i) {
    const float* cosine = scratch.cosine.data() + i * head_dim / 2;
    const float* sine = scratch.sine.data() + i * head_dim / 2;
    AddBias(weights.q_bias, scratch.q.data() + i * q_size);
    AddBias(weights.k_bias, scratch.k.data() + i * kv_size);
    AddBias(weights.v_bias, scratch.v.data() + i * kv_size);
    const auto norm_and_rotate = [&](const std::vector<float>& norm, float* heads, int count) {
      for (int h = 0; h < count; ++h) {
        if (!norm.empty()) {
          RmsNorm(heads + h * head_dim, norm, config_.rms_norm_eps, heads + h * head_dim);
        }
        ApplyRope(cosine, sine, config_.head_dim, heads + h * head_dim);
      }
    };
    norm_and_rotate(weights.q_norm, scratch.q.data() + i * q_size, config_.q_heads);
    norm_and_rotate(weights.k_norm, scratch.k.data() + i * kv_size, config_.kv_heads);
    RoundToBf16(scratch.q.data() + i * q_size, q_size, scratch.q_bf16.data() + i * q_size);
    RoundToBf16(scratch.k.data() + i * kv_size, kv_size, scratch.k_bf16.data() + i * kv_size);
    RoundToBf16(scratch.v.data() + i * kv_size, kv_size, scratch.v_bf16.data() + i * kv_size);
  });

  CRUMB_RETURN_IF_ERROR(cache.Append(layer, tokens, scratch.k_bf16.data(), scratch.v_bf16.data()));
  CRUMB_RETURN_IF_ERROR(
      cache.Attend(layer, tokens, scratch.q_bf16.data(), scratch.attended.data()));

  Multiply(weights.o_proj, tokens, scratch.attended.data(), scratch.delta.data(), *pool_);
  ForRows(*pool_, tokens, [&](int i) {
    AddBias(weights.o_bias, scratch.delta.data() + i * hidden);
    for (size_t c = i * hidden; c < (i + 1) * hidden; ++c) scratch.hidden[c] += scratch.delta[c];
  });
  return absl::OkStatus();
}

void Engine::MlpBlock(int layer, int tokens, Scratch& scratch) const {
  const LayerWeights& weights = weights_.layers[layer];
  const size_t hidden = config_.hidden_size;
  const size_t inner = config_.intermediate_size;
  ForRows(*pool_, tokens, [&](int i) {
    RmsNorm(scratch.hidden.data() + i * hidden, weights.mlp_norm, config_.rms_norm_eps,
            scratch.normed.data() + i * hidden);
  });
  Multiply(weights.gate_proj, tokens, scratch.normed.data(), scratch.gate.data(), *pool_);
  Multiply(weights.up_proj, tokens, scratch.normed.data(), scratch.up.data(), *pool_);
  ForRows(*pool_, tokens, [&](int i) {
    for (size_t c = i * inner; c < (i + 1) * inner; ++c) {
      const float gate = scratch.gate[c];
      scratch.gate[c] = gate / (1.0f + std::exp(-gate)) * scratch.up[c];
    }
  });
  Multiply(weights.down_proj, tokens, scratch.gate.data(), scratch.delta.data(), *pool_);
  ForRows(*pool_, tokens, [&](int i) {
    for (size_t c = i * hidden; c < (i + 1) * hidden; ++c) scratch.hidden[c] += scratch.delta[c];
  });
}

void Engine::WriteLogits(const float* hidden, int rows, Scratch& scratch, float* out) const {
  const size_t size = config_.hidden_size;
  ForRows(*pool_, rows, [&](int i) {
    RmsNorm(hidden + i * size, weights_.final_norm, config_.rms_norm_eps,
            scratch.normed.data() + i * size);
  });
  Multiply(weights_.output(), rows, scratch.normed.data(), out, *pool_);
}

}  // namespace crumb::models
