// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "models/tokenizer.h"

// Passkeys: five digits under a name that are hidden in a text. A question after the text requests
// them.
namespace crumb::bench {

// A key of a document.
struct Passkey {
  std::string digits;             // five
  std::vector<int32_t> line;      // tokens of the line with the key
  std::vector<int32_t> question;  // tokens after the document
  std::vector<int32_t> answer;    // " " and the digits
  int position = 0;               // position of the line's first token in the document
};

struct PasskeyDocument {
  // A multiple of 64 tokens. It contains the lines of all keys or, if keys are apart, of none.
  std::vector<int32_t> tokens;
  std::vector<Passkey> keys;  // sorted by position
  // Whether every key has a document without the other keys; its position is a multiple of 64 then.
  bool apart = false;

  // Returns the document that contains `key`, as long as `tokens`.
  std::vector<int32_t> TokensWith(const Passkey& key) const;
  double DepthOf(const Passkey& key) const {
    return static_cast<double>(key.position) / static_cast<double>(tokens.size());
  }
  // Returns the tokens from the key's line to the answer's first token.
  int DistanceOf(const Passkey& key) const {
    return static_cast<int>(tokens.size() + key.question.size()) - key.position;
  }
};

enum class PasskeyLayout {
  kApart,     // one key per document, the usual task
  kTogether,  // all keys in one document, so that each distracts from the others
};

// Makes documents with `count` keys in all, up to 16 per document. Their lengths are evenly spread
// from a quarter of `context` (at least 1,024 tokens, if the context has them) to all of it except
// 64 for question and answer. Keys are behind the sink and before the last 320 tokens, one in each
// equal part of that range, so that all of them are in the history when the question comes. The
// text around them is taken from `tokens`. Deterministic. kInvalidArgument: the context is below
// 640, or there is less text.
absl::StatusOr<std::vector<PasskeyDocument>> MakePasskeyDocuments(
    const models::Tokenizer& tokenizer, const std::vector<int32_t>& tokens, int context, int count,
    PasskeyLayout layout);

// Returns whether generated text gives the key: blanks, then exactly its five digits.
bool AnswersPasskey(std::string_view generated, std::string_view digits);

// Returns whether more tokens may still change AnswersPasskey: the text has only blanks and at most
// five digits.
bool PasskeyUndecided(std::string_view generated);

}  // namespace crumb::bench
