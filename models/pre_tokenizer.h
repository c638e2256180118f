// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace crumb::models {

// The Unicode properties that tokenizers use, and how text is split into pieces before byte pairs
// are merged. Text is UTF-8; invalid bytes are kept and count as characters.

enum class CharClass {
  kLetter,   // general category L
  kNumber,   // general category N
  kNewline,  // CR or LF
  kSpace,    // other White_Space
  kOther,    // everything else, including invalid bytes
};

struct Char {
  CharClass char_class = CharClass::kOther;
  char32_t code_point = 0;  // 0xFFFFFFFF for an invalid byte
  size_t length = 0;        // bytes
};

// Returns the character that begins at `position`. REQUIRES: position < text.size().
Char CharAt(std::string_view text, size_t position);

// Returns `text` in normalization form C, in which invalid bytes are kept. REQUIRES: `text` has at
// most 1 GiB.
std::string ToNfc(std::string_view text);

// The patterns by which published byte-level tokenizers split text; no merge crosses a boundary.
// They are recognised by their regular expression and matched by hand-written code.
enum class SplitPattern {
  kNone,    // the whole text is one piece
  kGpt2,    // the pattern of a ByteLevel pre-tokenizer with use_regex
  kQwen,    // the Split pattern of Qwen2 and Qwen3: single digits, newlines kept with punctuation
  kLlama3,  // the Split pattern of Llama 3: as Qwen's, with up to three digits together
  kDigitsGpt2,  // a Digits pre-tokenizer before GPT-2's pattern, as SmolLM's: single digits
};

// Returns the pattern whose regular expression is exactly `regex`, or nothing.
std::optional<SplitPattern> PatternOf(std::string_view regex);

// Returns the pieces of `text` in order. Together they are the whole text, to which they refer.
std::vector<std::string_view> Split(SplitPattern pattern, std::string_view text);

}  // namespace crumb::models
