// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
// models/data/retrieval, which python/bench/long_context trains, in the engine of models/.
#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <vector>

#include "models/engine.h"
#include "models/kv_cache.h"
#include "models/logits.h"

namespace crumb::models {
namespace {

// Token ids of python/bench/long_context/tasks.py.
constexpr int32_t kBegin = 0, kQuery = 1, kFirstSymbol = 64, kFirstWord = 3136, kVocabulary = 3648;
constexpr int kTokens = 1024;  // length of a document
constexpr int kNeedles = 20;

struct Document {
  std::vector<int32_t> tokens;
  std::vector<int32_t> names, values;
};

// Returns words in which needles lie at equal distances.
Document MakeDocument(uint32_t seed) {
  std::mt19937 random(seed);
  std::uniform_int_distribution<int32_t> word(kFirstWord, kVocabulary - 1);
  Document document;
  for (int i = 0; i < kTokens; ++i) document.tokens.push_back(word(random));
  document.tokens[0] = kBegin;
  std::vector<int32_t> symbols(kFirstWord - kFirstSymbol);
  for (size_t i = 0; i < symbols.size(); ++i) symbols[i] = kFirstSymbol + static_cast<int32_t>(i);
  std::shuffle(symbols.begin(), symbols.end(), random);
  for (int i = 0; i < kNeedles; ++i) {
    document.names.push_back(symbols[2 * i]);
    document.values.push_back(symbols[2 * i + 1]);
    const int at = 5 + i * (kTokens - 10) / kNeedles;
    document.tokens[at] = document.names.back();
    document.tokens[at + 1] = document.values.back();
  }
  return document;
}

TEST(RetrievalModelTest, FindsNeedlesInADocument) {
  auto engine = Engine::Load("models/data/retrieval", {.threads = 2});
  ASSERT_TRUE(engine.ok()) << engine.status();
  ASSERT_EQ((*engine)->config().vocab_size, kVocabulary);
  const Document document = MakeDocument(1);
  DenseKvCache cache((*engine)->config(), (*engine)->pool());
  ASSERT_TRUE((*engine)->Forward(cache, document.tokens, LogitRows::kLast).ok());
  int right = 0;
  for (int i = kNeedles - 1; i >= 0; --i) {  // one query after the other, with its value
    const std::vector<int32_t> query = {kQuery, document.names[i]};
    const auto logits = (*engine)->Forward(cache, query, LogitRows::kLast);
    ASSERT_TRUE(logits.ok()) << logits.status();
    if (GreedyToken(logits->last()) == document.values[i]) ++right;
    const std::vector<int32_t> value = {document.values[i]};
    ASSERT_TRUE((*engine)->Forward(cache, value, LogitRows::kLast).ok());
  }
  EXPECT_GE(right, kNeedles - 1);
}

}  // namespace
}  // namespace crumb::models
