// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "models/pre_tokenizer.h"

#include <unicode/bytestream.h>
#include <unicode/normalizer2.h>
#include <unicode/uchar.h>
#include <unicode/utf8.h>

#include <algorithm>
#include <cstddef>

namespace crumb::models {
namespace {

constexpr char32_t kNotUtf8 = 0xFFFFFFFF;
constexpr size_t kCharBytesMax = 4;

CharClass ClassOf(char32_t code_point) {
  if (code_point == '\r' || code_point == '\n') return CharClass::kNewline;
  const UChar32 c = static_cast<UChar32>(code_point);
  const uint32_t category = U_GET_GC_MASK(c);
  if ((category & U_GC_L_MASK) != 0) return CharClass::kLetter;
  if ((category & U_GC_N_MASK) != 0) return CharClass::kNumber;
  if (u_isUWhiteSpace(c)) return CharClass::kSpace;
  return CharClass::kOther;
}

// Returns the end of the longest stretch of valid UTF-8 at `begin`, or of invalid bytes if `valid`
// is false.
size_t RunEnd(std::string_view text, size_t begin, bool valid) {
  size_t end = begin;
  while (end < text.size()) {
    const Char c = CharAt(text, end);
    if ((c.code_point != kNotUtf8) != valid) break;
    end += c.length;
  }
  return end;
}

}  // namespace

Char CharAt(std::string_view text, size_t position) {
  const auto* bytes = reinterpret_cast<const uint8_t*>(text.data()) + position;
  const int32_t available = static_cast<int32_t>(std::min(text.size() - position, kCharBytesMax));
  int32_t length = 0;
  UChar32 c;
  U8_NEXT(bytes, length, available, c);
  if (c < 0) return {CharClass::kOther, kNotUtf8, 1};
  return {ClassOf(static_cast<char32_t>(c)), static_cast<char32_t>(c), static_cast<size_t>(length)};
}

std::string ToNfc(std::string_view text) {
  const bool ascii =
      std::all_of(text.begin(), text.end(), [](char c) { return static_cast<uint8_t>(c) < 0x80; });
  UErrorCode error = U_ZERO_ERROR;
  const icu::Normalizer2* nfc = icu::Normalizer2::getNFCInstance(error);
  // ICU's library contains the data of this normalizer, so the call does not fail.
  if (ascii || U_FAILURE(error)) return std::string(text);
  std::string out;
  out.reserve(text.size());
  icu::StringByteSink<std::string> sink(&out);
  size_t position = 0;
  while (position < text.size()) {
    const size_t valid_end = RunEnd(text, position, true);
    const icu::StringPiece piece(text.data() + position,
                                 static_cast<int32_t>(valid_end - position));
    nfc->normalizeUTF8(0, piece, sink, nullptr, error);
    position = RunEnd(text, valid_end, false);
    out.append(text, valid_end, position - valid_end);
  }
  return out;
}

namespace {

constexpr std::string_view kGpt2Regex =
    R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";
constexpr std::string_view kQwenRegex =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|)"
    R"(\s*[\r\n]+|\s+(?!\S)|\s+)";
constexpr std::string_view kLlama3Regex =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|)"
    R"(\s*[\r\n]+|\s+(?!\S)|\s+)";

// U+017F folds to s, so a case-insensitive 's matches it.
constexpr char32_t kLongS = 0x17F;

bool IsSpace(CharClass c) { return c == CharClass::kSpace || c == CharClass::kNewline; }

// Finds the end of the piece that begins at a position. Each Match function returns that end, or
// the position itself if its part of the pattern does not match.
class Matcher {
 public:
  explicit Matcher(std::string_view text) : text_(text) {}

  size_t Gpt2(size_t at) const {
    size_t end = MatchContraction(at, /*any_case=*/false);
    if (end == at) end = MatchRun(AfterBlank(at), CharClass::kLetter, at);
    if (end == at) end = MatchRun(AfterBlank(at), CharClass::kNumber, at);
    if (end == at) end = MatchRun(AfterBlank(at), CharClass::kOther, at);
    if (end == at) end = MatchSpaces(at);
    return end;
  }

  // Qwen's and Llama 3's patterns, which differ in the number of digits of a piece.
  size_t Words(size_t at, int digits_max) const {
    size_t end = MatchContraction(at, /*any_case=*/true);
    if (end == at) end = MatchWord(at);
    if (end == at) end = MatchDigits(at, digits_max);
    if (end == at) end = MatchPunctuation(at);
    if (end == at) end = MatchLines(at);
    if (end == at) end = MatchSpaces(at);
    return end;
  }

 private:
  // At the end of the text it is kSpace, with which no match begins.
  CharClass ClassAt(size_t at) const {
    return at < text_.size() ? CharAt(text_, at).char_class : CharClass::kSpace;
  }

  size_t AfterBlank(size_t at) const { return text_[at] == ' ' ? at + 1 : at; }

  // Matches one or more characters of `wanted` at `from`; returns `otherwise` if there is none.
  size_t MatchRun(size_t from, CharClass wanted, size_t otherwise) const {
    size_t end = from;
    while (end < text_.size()) {
      const Char c = CharAt(text_, end);
      if (c.char_class != wanted) break;
      end += c.length;
    }
    return end == from ? otherwise : end;
  }

  // Matches up to `most` digits.
  size_t MatchDigits(size_t at, int most) const {
    size_t end = at;
    for (int count = 0; count < most && ClassAt(end) == CharClass::kNumber; ++count) {
      end += CharAt(text_, end).length;
    }
    return end;
  }

  // Matches 's 't 're 've 'm 'll 'd.
  size_t MatchContraction(size_t at, bool any_case) const {
    if (text_[at] != '\'' || at + 1 >= text_.size()) return at;
    const Char first_char = CharAt(text_, at + 1);
    if (any_case && first_char.code_point == kLongS) return at + 1 + first_char.length;
    const auto letter = [&](size_t i) {
      const char c = i < text_.size() ? text_[i] : '\0';
      return any_case && c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c;
    };
    const char first = letter(at + 1);
    const char second = letter(at + 2);
    if (first == 's' || first == 't' || first == 'm' || first == 'd') return at + 2;
    if ((first == 'r' || first == 'v') && second == 'e') return at + 3;
    if (first == 'l' && second == 'l') return at + 3;
    return at;
  }

  // Matches letters with at most one character before them that is no letter, digit or newline.
  size_t MatchWord(size_t at) const {
    const Char c = CharAt(text_, at);
    const bool may_lead = c.char_class == CharClass::kSpace || c.char_class == CharClass::kOther;
    return MatchRun(may_lead ? at + c.length : at, CharClass::kLetter, at);
  }

  // Matches other characters with a blank before and newlines after them.
  size_t MatchPunctuation(size_t at) const {
    const size_t end = MatchRun(AfterBlank(at), CharClass::kOther, at);
    return end == at ? at : MatchRun(end, CharClass::kNewline, end);
  }

  // Matches white space up to its last newline.
  size_t MatchLines(size_t at) const {
    size_t end = at;
    for (size_t next = at; next < text_.size();) {
      const Char c = CharAt(text_, next);
      if (!IsSpace(c.char_class)) break;
      next += c.length;
      if (c.char_class == CharClass::kNewline) end = next;
    }
    return end;
  }

  // Matches white space. If it has several characters and other characters follow, the last one
  // belongs to the next piece.
  size_t MatchSpaces(size_t at) const {
    size_t end = at;
    size_t last = at;
    while (end < text_.size()) {
      const Char c = CharAt(text_, end);
      if (!IsSpace(c.char_class)) break;
      last = end;
      end += c.length;
    }
    return end < text_.size() && last > at ? last : end;
  }

  const std::string_view text_;
};

// The longest runs of digits that are one piece.
constexpr int kQwenDigits = 1;
constexpr int kLlama3Digits = 3;

// Appends the pieces of `text` by a single regular expression.
void AppendPieces(SplitPattern pattern, std::string_view text,
                  std::vector<std::string_view>* pieces) {
  const Matcher matcher(text);
  const int digits = pattern == SplitPattern::kLlama3 ? kLlama3Digits : kQwenDigits;
  for (size_t at = 0; at < text.size();) {
    const size_t end =
        pattern == SplitPattern::kGpt2 ? matcher.Gpt2(at) : matcher.Words(at, digits);
    pieces->push_back(text.substr(at, end - at));
    at = end;
  }
}

// Returns the position of the first digit at or behind `at`, or the end of the text.
size_t NextNumber(std::string_view text, size_t at) {
  while (at < text.size()) {
    const Char c = CharAt(text, at);
    if (c.char_class == CharClass::kNumber) break;
    at += c.length;
  }
  return at;
}

}  // namespace

std::optional<SplitPattern> PatternOf(std::string_view regex) {
  if (regex == kGpt2Regex) return SplitPattern::kGpt2;
  if (regex == kQwenRegex) return SplitPattern::kQwen;
  if (regex == kLlama3Regex) return SplitPattern::kLlama3;
  return std::nullopt;
}

std::vector<std::string_view> Split(SplitPattern pattern, std::string_view text) {
  std::vector<std::string_view> pieces;
  if (text.empty()) return pieces;
  if (pattern == SplitPattern::kNone) return {text};
  if (pattern == SplitPattern::kDigitsGpt2) {
    for (size_t at = 0; at < text.size();) {
      const Char first = CharAt(text, at);
      const bool digit = first.char_class == CharClass::kNumber;
      const size_t end = digit ? at + first.length : NextNumber(text, at);
      // GPT-2's pattern sees the end of the text where a digit follows.
      AppendPieces(SplitPattern::kGpt2, text.substr(at, end - at), &pieces);
      at = end;
    }
    return pieces;
  }
  AppendPieces(pattern, text, &pieces);
  return pieces;
}

}  // namespace crumb::models
