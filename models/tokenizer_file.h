// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "models/pre_tokenizer.h"

namespace crumb::models {

// A token that is searched in the text before any other step.
struct AddedToken {
  std::string text;
  int32_t id = 0;
  bool normalized = false;  // searched in the normalized text, otherwise in the text as given
};

// The contents of a tokenizer.json, with tokens as the bytes that they represent.
struct TokenizerDefinition {
  bool nfc = false;
  SplitPattern pattern = SplitPattern::kNone;
  bool whole_first = false;  // a piece that is a token is not merged
  int32_t unknown = -1;      // token of bytes that the vocabulary lacks; negative: they are dropped
  absl::flat_hash_map<std::string, int32_t> tokens;
  std::vector<std::pair<std::string, std::string>> merges;  // first learned first
  std::vector<AddedToken> added;
  std::vector<int32_t> begin;         // tokens before every text
  std::vector<std::string> bytes_of;  // indexed by id, with added tokens; empty: no such token
};

// Returns the errors of Tokenizer::Load.
absl::StatusOr<TokenizerDefinition> ReadTokenizerFile(const std::string& path);

}  // namespace crumb::models
