// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

// What the tokenizer needs to know of Unicode. Text is UTF-8; bytes that are not are kept as they
// are and count as characters of their own.
namespace crumb::models {

enum class CharClass {
  kLetter,   // general category L
  kNumber,   // general category N
  kNewline,  // CR or LF
  kSpace,    // other White_Space
  kOther,    // everything else, bytes that are not UTF-8 included
};

struct Char {
  CharClass char_class = CharClass::kOther;
  char32_t code_point = 0;  // 0xFFFFFFFF: a byte that is not UTF-8
  size_t length = 0;        // bytes
};

// The character that begins at `position`, which is below text.size().
Char CharAt(std::string_view text, size_t position);

// `text` in normalization form C; bytes that are not UTF-8 stay. At most 1 GiB.
std::string ToNfc(std::string_view text);

}  // namespace crumb::models
