// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "client/worker/prompt_key_cache.h"

#include <algorithm>
#include <random>
#include <thread>
#include <vector>

#include "gtest/gtest.h"

namespace crumb::client {
namespace {

KeyspaceId Keyspace(uint8_t number) {
  KeyspaceId id;
  id.bytes[0] = number;
  return id;
}

Digest Extra(uint8_t number) {
  Digest extra{};
  extra[31] = number;
  return extra;
}

// The reference: hashes every page.
std::vector<PageKey> Hashed(const KeyspaceId& keyspace, std::span<const int32_t> tokens,
                            std::span<const Digest> extra, PageKeyChain* chain) {
  std::vector<PageKey> keys;
  *chain = PageKeyChain(keyspace);
  for (size_t page = 0; (page + 1) * kPageTokens <= tokens.size(); ++page) {
    keys.push_back(chain->Next(tokens.subspan(page * kPageTokens, kPageTokens),
                               page < extra.size() ? extra[page] : Digest{}));
  }
  return keys;
}

// Finds a prompt, compares its keys with the reference and adds it; returns the number of known
// pages.
size_t KnownKeys(PromptKeyCache& known, const KeyspaceId& keyspace, std::span<const int32_t> tokens,
                 std::span<const Digest> extra = {}) {
  PromptKeys found = known.Find(keyspace, tokens, extra);
  const size_t pages = tokens.size() / kPageTokens, pages_known = found.keys.size();
  const PageKey* const first = found.keys.data();
  // In steps, as a prefix is acquired in parts; keys stay where they are.
  for (const size_t end : {(pages_known + pages) / 2, pages}) {
    HashPages(tokens, extra, end, &found.keys, &found.chain);
  }
  EXPECT_EQ(found.keys.data(), first);
  PageKeyChain chain(keyspace);
  EXPECT_EQ(found.keys, Hashed(keyspace, tokens, extra, &chain));
  const std::vector<int32_t> next(kPageTokens, 7);
  EXPECT_EQ(found.chain.Next(next), chain.Next(next));
  if (found.tokens != nullptr) {
    EXPECT_TRUE(std::ranges::equal(*found.tokens, tokens));
  } else {
    found.tokens = std::make_shared<const std::vector<int32_t>>(tokens.begin(), tokens.end());
  }
  known.Keep(keyspace, found.tokens, extra, found.keys);
  return pages_known;
}

std::vector<int32_t> Tokens(int count, int32_t first) {
  std::vector<int32_t> tokens(static_cast<size_t>(count));
  for (int i = 0; i < count; ++i) tokens[static_cast<size_t>(i)] = first + i;
  return tokens;
}

TEST(PromptKeyCacheTest, KnowsAPromptAgain) {
  PromptKeyCache known(1 << 16);
  const std::vector<int32_t> prompt = Tokens(10 * kPageTokens + 5, 100);
  EXPECT_EQ(KnownKeys(known, Keyspace(1), prompt), 0);
  EXPECT_EQ(KnownKeys(known, Keyspace(1), prompt), 10);
  EXPECT_EQ(known.prompts(), 1);
  EXPECT_EQ(known.tokens(), prompt.size());
}

TEST(PromptKeyCacheTest, AConversationsNextTurnTakesThePlaceOfTheLast) {
  PromptKeyCache known(1 << 16);
  std::vector<int32_t> prompt = Tokens(4 * kPageTokens, 100);
  KnownKeys(known, Keyspace(1), prompt);
  prompt.insert(prompt.end(), 3 * kPageTokens, 9);
  EXPECT_EQ(KnownKeys(known, Keyspace(1), prompt), 4);
  EXPECT_EQ(known.prompts(), 1);
  EXPECT_EQ(known.tokens(), 7 * kPageTokens);
  // The prompt of the previous request is a prefix of it.
  EXPECT_EQ(KnownKeys(known, Keyspace(1), std::span(prompt).first(4 * kPageTokens)), 4);
  EXPECT_EQ(known.prompts(), 1);
}

TEST(PromptKeyCacheTest, TakesTheLongestOfThoseThatBeginAlike) {
  PromptKeyCache known(1 << 16);
  std::vector<int32_t> one = Tokens(12 * kPageTokens, 100), two = one, three = one;
  two[5 * kPageTokens] = -1;
  three[9 * kPageTokens + 63] = -1;
  EXPECT_EQ(KnownKeys(known, Keyspace(1), one), 0);
  EXPECT_EQ(KnownKeys(known, Keyspace(1), two), 5);
  EXPECT_EQ(KnownKeys(known, Keyspace(1), three), 9);
  std::vector<int32_t> four = three;
  four[11 * kPageTokens] = -2;
  EXPECT_EQ(KnownKeys(known, Keyspace(1), four), 11);
}

TEST(PromptKeyCacheTest, KeyspacesAndExtrasAreApart) {
  PromptKeyCache known(1 << 16);
  const std::vector<int32_t> prompt = Tokens(6 * kPageTokens, 100);
  const std::vector<Digest> salt = {Extra(1)}, image = {Digest{}, Digest{}, Extra(2)};
  const std::vector<Digest> nothing(20), salt_and_nothing = {Extra(1), Digest{}, Digest{}};
  EXPECT_EQ(KnownKeys(known, Keyspace(1), prompt), 0);
  EXPECT_EQ(KnownKeys(known, Keyspace(2), prompt), 0);
  EXPECT_EQ(KnownKeys(known, Keyspace(1), prompt, salt), 0);
  EXPECT_EQ(KnownKeys(known, Keyspace(1), prompt, image), 2);
  EXPECT_EQ(KnownKeys(known, Keyspace(1), prompt, nothing), 6);
  EXPECT_EQ(KnownKeys(known, Keyspace(1), prompt, salt_and_nothing), 6);
  EXPECT_EQ(KnownKeys(known, Keyspace(1), prompt), 6);
}

TEST(PromptKeyCacheTest, StaysWithinItsBounds) {
  constexpr size_t kTokens = 40 * kPageTokens;
  PromptKeyCache known(kTokens);
  KnownKeys(known, Keyspace(1), Tokens(kTokens + kPageTokens, 1));
  EXPECT_EQ(known.prompts(), 0);
  for (int i = 0; i < 100; ++i) {
    KnownKeys(known, Keyspace(1), Tokens((1 + i % 7) * kPageTokens, 1000 * i));
    EXPECT_LE(known.tokens(), kTokens);
    EXPECT_LE(known.prompts(), PromptKeyCache::kPromptsMax);
  }
  // The latest prompt stays, the least recently used one is evicted.
  EXPECT_EQ(KnownKeys(known, Keyspace(1), Tokens(2 * kPageTokens, 99000)), 2);
  EXPECT_EQ(KnownKeys(known, Keyspace(1), Tokens(kPageTokens, 0)), 0);
  PromptKeyCache none(0);
  EXPECT_EQ(KnownKeys(none, Keyspace(1), Tokens(kPageTokens, 0)), 0);
  EXPECT_EQ(KnownKeys(none, Keyspace(1), Tokens(kPageTokens, 0)), 0);
}

TEST(PromptKeyCacheTest, ShortPromptsHaveNoPages) {
  PromptKeyCache known(1 << 16);
  EXPECT_EQ(KnownKeys(known, Keyspace(1), {}), 0);
  EXPECT_EQ(KnownKeys(known, Keyspace(1), Tokens(kPageTokens - 1, 0)), 0);
  EXPECT_EQ(known.prompts(), 0);
}

// Prompts that are random combinations of each other.
TEST(PromptKeyCacheTest, RandomPromptsHaveTheirOwnKeys) {
  std::mt19937 random(20261122);
  const auto draw = [&](int below) {
    return static_cast<int>(random() % static_cast<uint32_t>(below));
  };
  PromptKeyCache known(300 * kPageTokens);
  std::vector<std::vector<int32_t>> prompts = {Tokens(20 * kPageTokens, 0)};
  size_t reused = 0;
  for (int i = 0; i < 400; ++i) {
    std::vector<int32_t> prompt =
        prompts[static_cast<size_t>(draw(static_cast<int>(prompts.size())))];
    prompt.resize(static_cast<size_t>(draw(static_cast<int>(prompt.size()) + 1)));
    for (int more = draw(10 * kPageTokens); more > 0; --more) prompt.push_back(draw(3));
    if (!prompt.empty() && draw(2) == 0)
      prompt[static_cast<size_t>(draw(static_cast<int>(prompt.size())))] ^= 1;
    std::vector<Digest> extra(static_cast<size_t>(draw(3)));
    if (!extra.empty()) extra[0] = Extra(static_cast<uint8_t>(draw(2)));
    reused += KnownKeys(known, Keyspace(static_cast<uint8_t>(draw(2))), prompt, extra);
    prompts.push_back(std::move(prompt));
  }
  EXPECT_GT(reused, 0);
}

TEST(PromptKeyCacheTest, ThreadsShareIt) {
  PromptKeyCache known(64 * kPageTokens);
  std::vector<std::thread> threads;
  for (int thread = 0; thread < 4; ++thread) {
    threads.emplace_back([&known, thread] {
      for (int i = 0; i < 50; ++i) {
        KnownKeys(known, Keyspace(1), Tokens((1 + (i + thread) % 9) * kPageTokens, i % 5));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace
}  // namespace crumb::client
