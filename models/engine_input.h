// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>

#include "absl/status/status.h"
#include "models/config.h"

// What every engine refuses before it touches a cache: kInvalidArgument, with a message for the
// caller.
namespace crumb::models {

absl::Status CheckChunkTokens(int chunk_tokens);

// `tokens` at positions `length` and on: at least one, within the vocabulary and the positions.
absl::Status CheckForwardInput(const ModelConfig& config, int length,
                               std::span<const int32_t> tokens);

}  // namespace crumb::models
