// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "models/engine_input.h"

#include "absl/strings/str_cat.h"

namespace crumb::models {

absl::Status CheckChunkTokens(int chunk_tokens) {
  if (chunk_tokens >= 1) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("chunk_tokens must be at least 1, it is ", chunk_tokens));
}

absl::Status CheckForwardInput(const ModelConfig& config, int length,
                               std::span<const int32_t> tokens) {
  if (tokens.empty()) return absl::InvalidArgumentError("no tokens to run through the model");
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

}  // namespace crumb::models
