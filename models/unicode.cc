// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "models/unicode.h"

#include <unicode/bytestream.h>
#include <unicode/normalizer2.h>
#include <unicode/uchar.h>
#include <unicode/utf8.h>

#include <algorithm>

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

// The end of the longest run of UTF-8 (or, with `valid` false, of bytes that are not) at `begin`.
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
  // ICU carries this normalizer's data in its library, so it is there.
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

}  // namespace crumb::models
