// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "models/unicode.h"

#include <gtest/gtest.h>

#include <random>

namespace crumb::models {
namespace {

TEST(UnicodeTest, ClassesOfCharacters) {
  struct Case {
    const char* text;
    CharClass char_class;
  };
  for (const Case& c :
       {Case{"a", CharClass::kLetter}, Case{"ß", CharClass::kLetter},
        Case{"中", CharClass::kLetter}, Case{"ʰ", CharClass::kLetter},
        Case{"7", CharClass::kNumber}, Case{"½", CharClass::kNumber}, Case{"Ⅷ", CharClass::kNumber},
        Case{"\n", CharClass::kNewline}, Case{"\r", CharClass::kNewline},
        Case{" ", CharClass::kSpace}, Case{"\v", CharClass::kSpace},
        Case{"\u0085", CharClass::kSpace}, Case{"\u2003", CharClass::kSpace},
        Case{"\u200b", CharClass::kOther}, Case{"\u0301", CharClass::kOther},
        Case{"_", CharClass::kOther}, Case{"😀", CharClass::kOther}}) {
    const Char got = CharAt(c.text, 0);
    EXPECT_EQ(got.char_class, c.char_class) << c.text;
    EXPECT_EQ(got.length, std::string(c.text).size()) << c.text;
  }
}

TEST(UnicodeTest, BytesThatAreNotUtf8StandAlone) {
  // Stray continuation, overlong, surrogate, beyond U+10FFFF, cut at the end.
  for (const std::string text :
       {"\x80", "\xc0\x80", "\xed\xa0\x80", "\xf4\x90\x80\x80", "\xe4\xb8"}) {
    for (size_t at = 0; at < text.size(); ++at) {
      const Char got = CharAt(text, at);
      EXPECT_EQ(got.length, 1u);
      EXPECT_EQ(got.char_class, CharClass::kOther);
    }
  }
}

TEST(UnicodeTest, Normalizes) {
  EXPECT_EQ(ToNfc("plain"), "plain");
  EXPECT_EQ(ToNfc("e\u0301A\u030a"), "é\u00c5");
  EXPECT_EQ(ToNfc("\u212b\u1100\u1161"), "\u00c5가");
  EXPECT_EQ(ToNfc("\xff"
                  "e\u0301\x80"),
            "\xff"
            "é\x80");
  EXPECT_EQ(ToNfc(""), "");
}

TEST(UnicodeTest, NormalizingTwiceIsNormalizingOnce) {
  const uint32_t seed = std::random_device{}();
  SCOPED_TRACE(testing::Message() << "seed " << seed);
  std::mt19937 random(seed);
  for (int round = 0; round < 2000; ++round) {
    std::string text;
    for (int i = random() % 20; i > 0; --i) text += static_cast<char>(random());
    const std::string once = ToNfc(text);
    EXPECT_EQ(ToNfc(once), once);
  }
}

}  // namespace
}  // namespace crumb::models
