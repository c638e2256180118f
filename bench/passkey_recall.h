// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "bench/passkeys.h"
#include "bench/quality_method_set.h"
#include "bench/quality_workload.h"
#include "models/engine.h"
#include "models/tokenizer.h"

// Whether a model finds passkeys in a history that a method stores.
namespace crumb::bench {

struct KeyScore {
  bool right = false;
  double answer_nll = 0.0;  // mean negative log-likelihood of the right answer's tokens, nats
};

// The scores of a document's keys, one entry per document; empty if the run was interrupted before.
using DocumentScores = std::vector<std::optional<std::vector<KeyScore>>>;

// log(sum(exp(row))).
double LogSumExp(std::span<const float> row);

// Asks a model for passkeys. Thread-safe. `engine` and `tokenizer` must outlive it.
class PasskeyRecall {
 public:
  PasskeyRecall(const models::Engine& engine, const models::Tokenizer& tokenizer)
      : engine_(engine), tokenizer_(tokenizer) {}

  // Scores all keys of a document. The document is read once; each key's question continues a fork
  // of that sequence, from the end of the document or, if keys are apart, from the key's line.
  absl::StatusOr<std::vector<KeyScore>> Score(const QualityMethod& method,
                                              const PasskeyDocument& document) const;

 private:
  // Reads on to the end of `tokens`, the beginning of which is in the cache.
  absl::Status Read(MethodCache& cache, std::span<const int32_t> tokens) const;
  // Puts the question of one key, and scores the generated answer. Appends to `cache`.
  absl::StatusOr<KeyScore> Ask(MethodCache& cache, const Passkey& key) const;
  // Generates greedily until it is decided whether the text is a key. Appends to `cache`.
  absl::StatusOr<std::string> Generate(MethodCache& cache, std::span<const int32_t> question) const;

  const models::Engine& engine_;
  const models::Tokenizer& tokenizer_;
};

// Sets the passkey figures of `row` from the scores of its method and of bf16, the baseline.
void SummarizeRecall(std::span<const PasskeyDocument> documents, const DocumentScores& scores,
                     const DocumentScores& baseline, QualityRow& row);

}  // namespace crumb::bench
