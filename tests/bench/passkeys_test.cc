// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "bench/passkeys.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>

namespace crumb::bench {
namespace {

TEST(PasskeyScoreTest, OnlyTheFiveDigitsAreRight) {
  EXPECT_TRUE(AnswersPasskey(" 12345.", "12345"));
  EXPECT_TRUE(AnswersPasskey("12345", "12345"));
  EXPECT_TRUE(AnswersPasskey(" 12345\n# 99", "12345"));
  EXPECT_FALSE(AnswersPasskey(" 123456", "12345"));
  EXPECT_FALSE(AnswersPasskey(" 1234", "12345"));
  EXPECT_FALSE(AnswersPasskey(" 12346.", "12345"));
  EXPECT_FALSE(AnswersPasskey(" the 12345", "12345"));
  EXPECT_FALSE(AnswersPasskey("", "12345"));
}

TEST(PasskeyScoreTest, GenerationEndsWhenItIsDecided) {
  EXPECT_TRUE(PasskeyUndecided(""));
  EXPECT_TRUE(PasskeyUndecided(" "));
  EXPECT_TRUE(PasskeyUndecided(" 123"));
  EXPECT_TRUE(PasskeyUndecided(" 12345"));  // a sixth digit would make it wrong
  EXPECT_FALSE(PasskeyUndecided(" 123456"));
  EXPECT_FALSE(PasskeyUndecided(" 12."));
  EXPECT_FALSE(PasskeyUndecided("the"));
}

class PasskeyDocumentTest : public testing::Test {
 protected:
  void SetUp() override {
    auto tokenizer = models::Tokenizer::Load("models/data/tiny-lm");
    ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
    tokenizer_ = *std::move(tokenizer);
    std::string text;
    for (int i = 0; i < 2000; ++i) text += "a line of text, number " + std::to_string(i) + "\n";
    tokens_ = tokenizer_->Encode(text);
  }

  std::unique_ptr<models::Tokenizer> tokenizer_;
  std::vector<int32_t> tokens_;
};

TEST_F(PasskeyDocumentTest, KeysLieWhereTheySayAndInTheHistory) {
  const auto documents =
      MakePasskeyDocuments(*tokenizer_, tokens_, 4096, 50, PasskeyLayout::kTogether);
  ASSERT_TRUE(documents.ok()) << documents.status();
  ASSERT_EQ(documents->size(), 4u);
  int keys = 0;
  for (const PasskeyDocument& document : *documents) {
    const int length = static_cast<int>(document.tokens.size());
    EXPECT_EQ(length % 64, 0);
    EXPECT_LE(length, 4096 - 64);
    std::set<std::string> questions;
    for (const Passkey& key : document.keys) {
      ++keys;
      EXPECT_GE(key.position, 64);
      EXPECT_LE(key.position, length - 320);
      const std::span<const int32_t> tail =
          std::span<const int32_t>(document.tokens).subspan(key.position, 40);
      const std::string text = tokenizer_->Decode(tail);
      EXPECT_THAT(text, testing::StartsWith("\n# The pass key for "));
      EXPECT_THAT(text, testing::HasSubstr(" is " + key.digits + ".\n"));
      const std::string question = tokenizer_->Decode(key.question);
      EXPECT_THAT(question, testing::StartsWith("\n# What is the pass key for "));
      EXPECT_THAT(question, testing::EndsWith("? It is"));
      EXPECT_TRUE(questions.insert(question).second) << "a name twice in one document";
      EXPECT_EQ(tokenizer_->Decode(key.answer), " " + key.digits);
      EXPECT_EQ(document.DistanceOf(key),
                length + static_cast<int>(key.question.size()) - key.position);
    }
  }
  EXPECT_EQ(keys, 50);
  EXPECT_EQ(documents->front().tokens.size(), 1024u);
  EXPECT_EQ(documents->back().tokens.size(), 4032u);
}

TEST_F(PasskeyDocumentTest, KeysApartAreAloneInTheirDocument) {
  const auto documents =
      MakePasskeyDocuments(*tokenizer_, tokens_, 4096, 50, PasskeyLayout::kApart);
  ASSERT_TRUE(documents.ok()) << documents.status();
  int keys = 0;
  for (const PasskeyDocument& document : *documents) {
    EXPECT_THAT(tokenizer_->Decode(document.tokens), testing::Not(testing::HasSubstr("pass key")));
    int before = 0;
    for (const Passkey& key : document.keys) {
      ++keys;
      EXPECT_EQ(key.position % 64, 0);
      EXPECT_GE(key.position, std::max(64, before));
      before = key.position;
      EXPECT_LE(key.position + static_cast<int>(key.line.size()),
                static_cast<int>(document.tokens.size()) - 256);
      const std::vector<int32_t> with = document.TokensWith(key);
      ASSERT_EQ(with.size(), document.tokens.size());
      EXPECT_TRUE(std::equal(with.begin(), with.begin() + key.position, document.tokens.begin()));
      const std::string text = tokenizer_->Decode(with);
      EXPECT_THAT(text, testing::HasSubstr(" is " + key.digits + ".\n"));
      EXPECT_EQ(text.find("pass key"), text.rfind("pass key"));
    }
  }
  EXPECT_EQ(keys, 50);
}

TEST_F(PasskeyDocumentTest, ShortContextsHoldFewerKeys) {
  const auto documents =
      MakePasskeyDocuments(*tokenizer_, tokens_, 640, 5, PasskeyLayout::kTogether);
  ASSERT_TRUE(documents.ok()) << documents.status();
  EXPECT_EQ(documents->size(), 3u);
  for (const PasskeyDocument& document : *documents) {
    EXPECT_EQ(document.tokens.size(), 576u);
    for (const Passkey& key : document.keys) EXPECT_LE(key.position, 576 - 320);
  }
}

TEST_F(PasskeyDocumentTest, TooLittleRoomOrTextIsSaid) {
  EXPECT_THAT(std::string(MakePasskeyDocuments(*tokenizer_, tokens_, 600, 5, PasskeyLayout::kApart)
                              .status()
                              .message()),
              testing::HasSubstr("the context is 600"));
  tokens_.resize(100);
  EXPECT_THAT(std::string(MakePasskeyDocuments(*tokenizer_, tokens_, 1024, 5, PasskeyLayout::kApart)
                              .status()
                              .message()),
              testing::HasSubstr("have 100 tokens"));
}

}  // namespace
}  // namespace crumb::bench
