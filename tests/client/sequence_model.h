// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "crumb/sequence.h"
#include "crumb/worker_options.h"
#include "kernels/tile.h"

namespace crumb::client {

// SequenceModel has synthetic keys, values and queries that depend on (layer, position, token)
// only, and computes attention over them in double precision, position by position.
class SequenceModel {
 public:
  SequenceModel(const WorkerOptions& options, std::vector<int32_t> tokens)
      : options_(options), tokens_(std::move(tokens)) {}

  // Rows of positions [begin, end) as an engine passes them to Append.
  std::vector<kernels::Bf16> Keys(int layer, int begin, int end) const;
  std::vector<kernels::Bf16> Values(int layer, int begin, int end) const;
  std::vector<kernels::Bf16> Queries(int layer, int begin, int end) const;

  // Returns the output of the token at `position` of `layer` if positions [64, history_end) are
  // attended in their stored format and all others in BF16, with the options' windows and sink
  // logits. [q_heads, head_dim]
  std::vector<double> Expected(int layer, int position, int history_end) const;

  // Runs one pass over [sequence.length(), end), of which the first `accepted` tokens stay. Returns
  // the outputs of every layer, [layers, tokens, q_heads, head_dim].
  std::vector<float> Pass(Sequence& sequence, int end, int accepted) const;
  std::vector<float> Pass(Sequence& sequence, int end) const {
    return Pass(sequence, end, end - sequence.length());
  }

  const std::vector<int32_t>& tokens() const { return tokens_; }
  std::span<const int32_t> prompt(int length) const { return {tokens_.data(), size_t(length)}; }

 private:
  enum class Kind : uint32_t { kKey, kValue, kQuery };
  std::vector<kernels::Bf16> Rows(Kind kind, int layer, int begin, int end) const;
  // Returns the rows of one KV head that attention uses, [64, head_dim] each.
  void Window(int layer, int head, int page, bool stored, std::vector<float>* k,
              std::vector<float>* v) const;

  WorkerOptions options_;
  std::vector<int32_t> tokens_;
};

// Worker options that are small enough for tests: 2 layers, 2 KV heads, 4 query heads, head_dim 64,
// a prefill block of 512.
WorkerOptions SmallWorkerOptions();

// Options of a small model with sliding windows and attention sinks, as gpt-oss has them: every
// other layer attends the last 128 positions, and every query head of each layer has a sink logit.
// 4 layers, 2 KV heads, 16 query heads, head_dim 64.
WorkerOptions WindowedWorkerOptions();

// Returns `count` token ids from `seed`.
std::vector<int32_t> RandomTokens(int count, uint32_t seed);

}  // namespace crumb::client
