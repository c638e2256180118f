// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "absl/status/statusor.h"
#include "client/examples/tiny_lm/run_options.h"
#include "models/tokenizer.h"

namespace crumb::tiny_lm {

// A prompt as the model reads it.
struct Prompt {
  std::vector<int32_t> tokens;
  std::optional<int32_t> end_of_turn;  // token that ends the answer of a chat model
};

// Reads the prompt that `options` name: a text, which begins with the tokenizer's begin tokens; one
// user's message; or a conversation. Messages are written by the chat template of the model's
// folder. kNotFound: a file or the template is missing. kInvalidArgument: the conversation or the
// template cannot be used; the message says why.
absl::StatusOr<Prompt> ReadPrompt(const RunOptions& options, const models::Tokenizer& tokenizer);

}  // namespace crumb::tiny_lm
