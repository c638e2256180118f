// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "models/pre_tokenizer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>
#include <string>

#include "tests/models/model_folder.h"

namespace crumb::models {
namespace {

using ::testing::ElementsAre;

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
  // A stray continuation, an overlong form, a surrogate, a value above U+10FFFF, a truncated form.
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

TEST(PreTokenizerTest, SplitsLikeGpt2) {
  EXPECT_THAT(Split(SplitPattern::kGpt2, "Hello world  it's 123, ok!\n\n"),
              ElementsAre("Hello", " world", " ", " it", "'s", " 123", ",", " ok", "!", "\n\n"));
  EXPECT_THAT(Split(SplitPattern::kGpt2, "IT'S\tx"), ElementsAre("IT", "'", "S", "\t", "x"));
}

TEST(PreTokenizerTest, SplitsLikeQwen) {
  EXPECT_THAT(Split(SplitPattern::kQwen, "IT'S\tx 12!\n\n  y\n \n"),
              ElementsAre("IT", "'S", "\tx", " ", "1", "2", "!\n\n", " ", " y", "\n \n"));
}

TEST(PreTokenizerTest, SplitsLikeLlama3) {
  EXPECT_THAT(Split(SplitPattern::kLlama3, "in 1234567, IT'S ٣½5"),
              ElementsAre("in", " ", "123", "456", "7", ",", " IT", "'S", " ", "٣½5"));
}

TEST(PreTokenizerTest, SplitsDigitsBeforeGpt2sPattern) {
  EXPECT_THAT(Split(SplitPattern::kDigitsGpt2, "in 20½ it's  7 !"),
              ElementsAre("in", " ", "2", "0", "½", " it", "'s", "  ", "7", " !"));
  EXPECT_THAT(Split(SplitPattern::kDigitsGpt2, ""), ElementsAre());
}

TEST(PreTokenizerTest, NoPatternLeavesTextWhole) {
  EXPECT_THAT(Split(SplitPattern::kNone, "a b"), ElementsAre("a b"));
  EXPECT_THAT(Split(SplitPattern::kNone, ""), ElementsAre());
}

TEST(PreTokenizerTest, KnowsPatternsByTheirText) {
  const nlohmann::json fixture = ReadJson("tests/models/fixtures/tokenizer.json");
  EXPECT_EQ(PatternOf(fixture["qwen_pattern"].get<std::string>()), SplitPattern::kQwen);
  const nlohmann::json families = ReadJson("tests/models/fixtures/tokenizers.json");
  EXPECT_EQ(PatternOf(families["llama3_pattern"].get<std::string>()), SplitPattern::kLlama3);
  EXPECT_EQ(PatternOf("\\s+"), std::nullopt);
}

TEST(PreTokenizerTest, PiecesOfAnyBytesAreTheText) {
  const uint32_t seed = std::random_device{}();
  SCOPED_TRACE(testing::Message() << "seed " << seed);
  std::mt19937 random(seed);
  const std::string common = "aZ'sS 09\n\r\t.,\xe4\xb8\xad\xc3\x9f\xc2\xa0\xff";
  for (int round = 0; round < 3000; ++round) {
    std::string text;
    for (int i = random() % 30; i > 0; --i) text += common[random() % common.size()];
    for (const SplitPattern pattern : {SplitPattern::kGpt2, SplitPattern::kQwen,
                                       SplitPattern::kLlama3, SplitPattern::kDigitsGpt2}) {
      std::string joined;
      for (const std::string_view piece : Split(pattern, text)) {
        ASSERT_FALSE(piece.empty());
        joined += piece;
      }
      ASSERT_EQ(joined, text);
    }
  }
}

}  // namespace

}  // namespace crumb::models
