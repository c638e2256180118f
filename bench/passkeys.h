// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "models/tokenizer.h"

// Passkeys: five digits under a name, hidden in a text, and asked for behind it.
namespace crumb::bench {

// One of a document's keys.
struct Passkey {
  std::string digits;             // five
  std::vector<int32_t> line;      // tokens that tell it
  std::vector<int32_t> question;  // tokens behind the document
  std::vector<int32_t> answer;    // " " and the digits
  int position = 0;               // of the line's first token in the document
};

struct PasskeyDocument {
  // A multiple of 64 tokens. With all keys' lines, or, where they are apart, with none of them.
  std::vector<int32_t> tokens;
  std::vector<Passkey> keys;  // by position
  // Every key is asked for in a document that tells no other; its position is a multiple of 64.
  bool apart = false;

  // The document that tells `key`, as long as `tokens`.
  std::vector<int32_t> TokensWith(const Passkey& key) const;
  double DepthOf(const Passkey& key) const {
    return static_cast<double>(key.position) / static_cast<double>(tokens.size());
  }
  // Tokens from the key's line to the answer's first token.
  int DistanceOf(const Passkey& key) const {
    return static_cast<int>(tokens.size() + key.question.size()) - key.position;
  }
};

enum class PasskeyLayout {
  kApart,     // one key in a document: the usual task
  kTogether,  // all of a document's keys at once: each distracts from the others
};

// Documents with `count` keys together, up to 16 for each. Their lengths spread evenly from a
// quarter of `context` (1,024 tokens at least, where it has them) to all of it less 64 for question
// and answer; keys lie behind the sink and before the last 320 tokens, one in each equal part of
// that range, so every one of them is in the history when it is asked for. The text around them
// comes from `tokens`. Deterministic. kInvalidArgument: a context below 640, or less text.
absl::StatusOr<std::vector<PasskeyDocument>> MakePasskeyDocuments(
    const models::Tokenizer& tokenizer, const std::vector<int32_t>& tokens, int context, int count,
    PasskeyLayout layout);

// Whether generated text answers with the key: blanks, then exactly its five digits.
bool AnswersPasskey(std::string_view generated, std::string_view digits);

// Whether more tokens can still change AnswersPasskey: nothing but blanks and at most five digits.
bool PasskeyUndecided(std::string_view generated);

}  // namespace crumb::bench
