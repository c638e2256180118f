// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "models/pre_tokenizer.h"

#include <cstddef>

#include "models/unicode.h"

namespace crumb::models {

namespace {

constexpr std::string_view kGpt2Regex =
    R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";
constexpr std::string_view kQwenRegex =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|)"
    R"(\s*[\r\n]+|\s+(?!\S)|\s+)";

// U+017F folds to s, so a case-insensitive 's takes it.
constexpr char32_t kLongS = 0x17F;

bool IsSpace(CharClass c) { return c == CharClass::kSpace || c == CharClass::kNewline; }

// Finds the end of the piece that begins at a position. Each Match function returns that end, or
// the position itself when its part of the pattern does not match.
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

  size_t Qwen(size_t at) const {
    size_t end = MatchContraction(at, /*any_case=*/true);
    if (end == at) end = MatchWord(at);
    if (end == at && ClassAt(at) == CharClass::kNumber) end = at + CharAt(text_, at).length;
    if (end == at) end = MatchPunctuation(at);
    if (end == at) end = MatchLines(at);
    if (end == at) end = MatchSpaces(at);
    return end;
  }

 private:
  // kSpace, which no run of ours begins with, at the end of the text.
  CharClass ClassAt(size_t at) const {
    return at < text_.size() ? CharAt(text_, at).char_class : CharClass::kSpace;
  }

  size_t AfterBlank(size_t at) const { return text_[at] == ' ' ? at + 1 : at; }

  // One or more characters of `wanted` from `from` on; `otherwise` when there is none.
  size_t MatchRun(size_t from, CharClass wanted, size_t otherwise) const {
    size_t end = from;
    while (end < text_.size()) {
      const Char c = CharAt(text_, end);
      if (c.char_class != wanted) break;
      end += c.length;
    }
    return end == from ? otherwise : end;
  }

  // 's 't 're 've 'm 'll 'd
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

  // Letters, with one character before them that is no letter, digit or newline.
  size_t MatchWord(size_t at) const {
    const Char c = CharAt(text_, at);
    const bool may_lead = c.char_class == CharClass::kSpace || c.char_class == CharClass::kOther;
    return MatchRun(may_lead ? at + c.length : at, CharClass::kLetter, at);
  }

  // Other characters, with a blank before and newlines after them.
  size_t MatchPunctuation(size_t at) const {
    const size_t end = MatchRun(AfterBlank(at), CharClass::kOther, at);
    return end == at ? at : MatchRun(end, CharClass::kNewline, end);
  }

  // White space up to the last newline in it.
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

  // White space without its last character, which goes with what follows, if it has several and
  // something follows.
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

}  // namespace

std::optional<SplitPattern> PatternOf(std::string_view regex) {
  if (regex == kGpt2Regex) return SplitPattern::kGpt2;
  if (regex == kQwenRegex) return SplitPattern::kQwen;
  return std::nullopt;
}

std::vector<std::string_view> Split(SplitPattern pattern, std::string_view text) {
  std::vector<std::string_view> pieces;
  if (text.empty()) return pieces;
  if (pattern == SplitPattern::kNone) return {text};
  const Matcher matcher(text);
  for (size_t at = 0; at < text.size();) {
    const size_t end = pattern == SplitPattern::kGpt2 ? matcher.Gpt2(at) : matcher.Qwen(at);
    pieces.push_back(text.substr(at, end - at));
    at = end;
  }
  return pieces;
}

}  // namespace crumb::models
