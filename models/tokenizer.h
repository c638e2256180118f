// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "models/bpe.h"
#include "models/tokenizer_file.h"

namespace crumb::models {

// Text to token ids and back, as an HF tokenizer.json of a byte-level BPE model says. Any bytes can
// be encoded: those that are not UTF-8 are tokens of their own. Adds no token that the text does
// not name (no begin-of-sequence). Immutable, so thread-safe.
class Tokenizer {
 public:
  // Reads `dir`/tokenizer.json. kNotFound: no such file. kInvalidArgument names the file, what was
  // found and what is supported: model BPE without dropout, prefixes, suffixes or byte_fallback;
  // normalizer none or NFC; pre-tokenizer ByteLevel, or Split with a known pattern followed by
  // ByteLevel; post-processor none or ByteLevel; decoder ByteLevel; added tokens without lstrip,
  // rstrip and single_word. Truncation and padding in the file are left to the caller.
  static absl::StatusOr<std::unique_ptr<Tokenizer>> Load(const std::string& dir);

  // At most 1 GiB. An added token's text inside `text` becomes that token.
  std::vector<int32_t> Encode(std::string_view text) const;

  // The bytes of the tokens one after the other; nothing for ids that are no token.
  // Decode(Encode(x)) is x, or x in NFC when the tokenizer normalizes. A token may end inside a
  // UTF-8 character.
  std::string Decode(std::span<const int32_t> ids) const;

  // The id of an added token such as "<|endoftext|>".
  std::optional<int32_t> AddedTokenId(const std::string& text) const;

  // One above the largest id.
  int size() const { return static_cast<int>(bytes_of_.size()); }

 private:
  // Texts of added tokens by first byte, longest first, with their ids.
  using AddedTokens = std::map<char, std::vector<std::pair<std::string, int32_t>>>;

  Tokenizer(TokenizerDefinition definition, BytePairs pairs);
  // Cuts `text` at the added tokens in it: appends their ids, gives what lies between to `between`.
  template <typename Between>
  static void CutAtAddedTokens(std::string_view text, const AddedTokens& added,
                               const Between& between, std::vector<int32_t>* ids);

  const bool nfc_;
  const SplitPattern pattern_;
  const BytePairs pairs_;
  const std::vector<std::string> bytes_of_;  // by id; empty: no such token
  AddedTokens added_raw_;                    // searched before normalization
  AddedTokens added_normalized_;             // searched after it
};

}  // namespace crumb::models
