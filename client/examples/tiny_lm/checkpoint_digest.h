// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "absl/status/statusor.h"

namespace crumb::tiny_lm {

// Returns, in hexadecimal, a SHA-256 over names and contents of the files that determine a model's
// keys and values: config.json and every *.safetensors of `dir`, sorted by name. Reads all of them.
absl::StatusOr<std::string> CheckpointDigest(const std::string& dir);

}  // namespace crumb::tiny_lm
