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

TEST(PreTokenizerTest, SplitsLikeGpt2) {
  EXPECT_THAT(Split(SplitPattern::kGpt2, "Hello world  it's 123, ok!\n\n"),
              ElementsAre("Hello", " world", " ", " it", "'s", " 123", ",", " ok", "!", "\n\n"));
  EXPECT_THAT(Split(SplitPattern::kGpt2, "IT'S\tx"), ElementsAre("IT", "'", "S", "\t", "x"));
}

TEST(PreTokenizerTest, SplitsLikeQwen) {
  EXPECT_THAT(Split(SplitPattern::kQwen, "IT'S\tx 12!\n\n  y\n \n"),
              ElementsAre("IT", "'S", "\tx", " ", "1", "2", "!\n\n", " ", " y", "\n \n"));
}

TEST(PreTokenizerTest, NoPatternLeavesTextWhole) {
  EXPECT_THAT(Split(SplitPattern::kNone, "a b"), ElementsAre("a b"));
  EXPECT_THAT(Split(SplitPattern::kNone, ""), ElementsAre());
}

TEST(PreTokenizerTest, KnowsPatternsByTheirText) {
  const nlohmann::json fixture = ReadJson("tests/models/fixtures/tokenizer.json");
  EXPECT_EQ(PatternOf(fixture["qwen_pattern"].get<std::string>()), SplitPattern::kQwen);
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
    for (const SplitPattern pattern : {SplitPattern::kGpt2, SplitPattern::kQwen}) {
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
