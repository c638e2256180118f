// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "common/printable.h"

#include <cstdint>

#include "fmt/format.h"

namespace crumb {
namespace {

struct CodePoint {
  uint32_t value = 0;
  size_t bytes = 0;  // 0: the text does not begin with valid UTF-8
};

constexpr bool IsContinuation(char c) { return (static_cast<unsigned char>(c) & 0xC0) == 0x80; }

// Decodes the first code point. Rejects overlong forms, surrogates and values above U+10FFFF.
CodePoint Decode(std::string_view text) {
  const auto first = static_cast<unsigned char>(text.front());
  if (first < 0x80) return {first, 1};
  const size_t bytes = first >= 0xF0 ? 4 : first >= 0xE0 ? 3 : 2;
  if (first < 0xC2 || first > 0xF4 || text.size() < bytes) return {};
  uint32_t value = first & (0xFFu >> (bytes + 1));
  for (size_t i = 1; i < bytes; ++i) {
    if (!IsContinuation(text[i])) return {};
    value = value << 6 | (static_cast<unsigned char>(text[i]) & 0x3Fu);
  }
  constexpr uint32_t kLeast[] = {0, 0, 0x80, 0x800, 0x10000};
  const bool surrogate = value >= 0xD800 && value <= 0xDFFF;
  if (value < kLeast[bytes] || value > 0x10FFFF || surrogate) return {};
  return {value, bytes};
}

constexpr bool IsHarmful(uint32_t value) {
  return value < 0x20 || (value >= 0x7F && value <= 0x9F) ||  // C0, DEL, C1
         value == 0x061C || value == 0x200E || value == 0x200F ||
         (value >= 0x2028 && value <= 0x202E) ||  // separators, embeddings and overrides
         (value >= 0x2066 && value <= 0x2069) ||  // isolates
         value == 0xFEFF;
}

std::string Escape(uint32_t value) {
  if (value == '\n') return "\\n";
  if (value == '\t') return "\\t";
  if (value == '\r') return "\\r";
  return value < 0x80 ? fmt::format("\\x{:02x}", value) : fmt::format("\\u{:04x}", value);
}

// Returns the next piece of output and removes the input that it represents from `text`.
std::string TakePiece(std::string_view& text) {
  const CodePoint next = Decode(text);
  if (next.bytes == 0) {
    const auto byte = static_cast<unsigned char>(text.front());
    text.remove_prefix(1);
    return fmt::format("\\x{:02x}", byte);
  }
  const std::string_view raw = text.substr(0, next.bytes);
  text.remove_prefix(next.bytes);
  return IsHarmful(next.value) ? Escape(next.value) : std::string(raw);
}

constexpr bool IsPlain(char c) { return c >= 0x20 && c < 0x7F; }

size_t PlainPrefix(std::string_view text) {
  size_t plain = 0;
  while (plain < text.size() && IsPlain(text[plain])) ++plain;
  return plain;
}

}  // namespace

std::string Printable(std::string_view text, size_t bytes_max) {
  std::string printed;
  while (!text.empty()) {
    const size_t plain = PlainPrefix(text);
    if (printed.size() + plain > bytes_max) {
      const size_t fits = bytes_max - printed.size();
      printed += text.substr(0, fits);
      text.remove_prefix(fits);
      return printed + fmt::format("... ({} bytes more)", text.size());
    }
    printed += text.substr(0, plain);
    text.remove_prefix(plain);
    if (text.empty()) break;
    std::string_view rest = text;
    const std::string piece = TakePiece(rest);
    if (printed.size() + piece.size() > bytes_max) {
      return printed + fmt::format("... ({} bytes more)", text.size());
    }
    printed += piece;
    text = rest;
  }
  return printed;
}

std::string PrintableLines(std::string_view text) {
  std::string printed;
  while (!text.empty()) {
    const size_t end = text.find('\n');
    printed += Printable(text.substr(0, end), std::string::npos / 2);
    if (end == std::string_view::npos) break;
    printed += '\n';
    text.remove_prefix(end + 1);
  }
  return printed;
}

}  // namespace crumb
