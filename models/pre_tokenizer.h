// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <optional>
#include <string_view>
#include <vector>

namespace crumb::models {

// How text is cut into pieces before byte pairs are merged; no merge crosses a cut. These are the
// patterns of published byte-level tokenizers, recognised by their text and matched by hand.
enum class SplitPattern {
  kNone,  // the whole text is one piece
  kGpt2,  // what a ByteLevel pre-tokenizer with use_regex does
  kQwen,  // the Split pattern of Qwen2 and Qwen3: single digits, newlines kept with punctuation
};

// The pattern whose regular expression is exactly `regex`, or nothing.
std::optional<SplitPattern> PatternOf(std::string_view regex);

// The pieces of `text` in order; together they are the text. They borrow it.
std::vector<std::string_view> Split(SplitPattern pattern, std::string_view text);

}  // namespace crumb::models
