// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "models/bpe.h"
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

// Converts text to token ids and back by the HF tokenizer.json of a byte-level BPE model. Any bytes
// can be encoded; invalid UTF-8 becomes tokens of single bytes. Immutable, so thread-safe.
class Tokenizer {
 public:
  // Reads `dir`/tokenizer.json. kNotFound: no such file. kInvalidArgument names the file, the value
  // and the supported ones: model BPE without dropout, prefixes, suffixes or byte_fallback;
  // normalizer none or NFC; pre-tokenizer ByteLevel, Split with a known pattern followed by
  // ByteLevel without one, or single Digits followed by ByteLevel with its pattern; post-processor
  // none, ByteLevel, or TemplateProcessing that puts tokens before the text; decoder ByteLevel;
  // added tokens without lstrip, rstrip and single_word. Truncation and padding in the file are
  // ignored.
  static absl::StatusOr<std::unique_ptr<Tokenizer>> Load(const std::string& dir);

  // Encodes `text`, in which the text of an added token becomes that token. Adds no tokens, such as
  // begin-of-sequence, that the text does not contain. Bytes that the vocabulary lacks become the
  // file's unknown token, or are dropped if the file has none, as by the published implementation.
  // REQUIRES: `text` has at most 1 GiB.
  std::vector<int32_t> Encode(std::string_view text) const;

  // Returns the bytes of the tokens one after the other; ids without a token have none.
  // Decode(Encode(x)) is x, or x in NFC if the tokenizer normalizes, unless the vocabulary lacks a
  // byte of x. A token may end inside a UTF-8 character.
  std::string Decode(std::span<const int32_t> ids) const;

  // Returns the tokens, such as begin-of-sequence, that the model expects before a text that is not
  // rendered by a chat template.
  const std::vector<int32_t>& begin() const { return begin_; }

  // Returns one more than the largest id.
  int size() const { return static_cast<int>(bytes_of_.size()); }

 private:
  // Texts of added tokens by first byte, longest first, with their ids.
  using AddedTokens = std::map<char, std::vector<std::pair<std::string, int32_t>>>;

  Tokenizer(TokenizerDefinition definition, BytePairs pairs);
  // Splits `text` at the added tokens in it: appends their ids and passes the text between them to
  // `between`.
  template <typename Between>
  static void CutAtAddedTokens(std::string_view text, const AddedTokens& added,
                               const Between& between, std::vector<int32_t>* ids);

  const bool nfc_;
  const SplitPattern pattern_;
  const BytePairs pairs_;
  const std::vector<int32_t> begin_;
  const std::vector<std::string> bytes_of_;  // indexed by id; empty: no such token
  AddedTokens added_raw_;                    // searched before normalization
  AddedTokens added_normalized_;             // searched after it
};

}  // namespace crumb::models
