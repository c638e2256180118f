// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "models/bpe.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <random>

namespace crumb::models {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

using Merges = std::vector<std::pair<std::string, std::string>>;

// The ids of bytes are their values; merges add tokens from 256 on.
absl::flat_hash_map<std::string, int32_t> Tokens(const Merges& merges) {
  absl::flat_hash_map<std::string, int32_t> tokens;
  for (int byte = 0; byte < 256; ++byte) tokens[std::string(1, static_cast<char>(byte))] = byte;
  for (const auto& [left, right] : merges) {
    tokens.try_emplace(left + right, static_cast<int32_t>(tokens.size()));
  }
  return tokens;
}

BytePairs Build(const Merges& merges, bool whole_first = false) {
  auto pairs = BytePairs::Build(Tokens(merges), merges, whole_first);
  EXPECT_TRUE(pairs.ok()) << pairs.status();
  return *std::move(pairs);
}

std::vector<int32_t> Encode(const BytePairs& pairs, const std::string& piece) {
  std::vector<int32_t> ids;
  pairs.Encode(piece, &ids);
  return ids;
}

// The definition of BPE: join the leftmost pair of the lowest rank until there is none.
std::vector<int32_t> Definition(const Merges& merges, const std::string& piece) {
  std::vector<std::string> parts;
  for (const char c : piece) parts.emplace_back(1, c);
  while (true) {
    size_t best_rank = merges.size();
    size_t best_at = 0;
    for (size_t i = 0; i + 1 < parts.size(); ++i) {
      for (size_t rank = 0; rank < best_rank; ++rank) {
        if (merges[rank] == std::pair(parts[i], parts[i + 1])) {
          best_rank = rank;
          best_at = i;
        }
      }
    }
    if (best_rank == merges.size()) break;
    parts[best_at] += parts[best_at + 1];
    parts.erase(parts.begin() + static_cast<int64_t>(best_at) + 1);
  }
  const auto tokens = Tokens(merges);
  std::vector<int32_t> ids;
  for (const std::string& part : parts) ids.push_back(tokens.at(part));
  return ids;
}

TEST(BpeTest, JoinsInTheOrderLearned) {
  const Merges merges = {{"b", "c"}, {"a", "b"}, {"a", "bc"}};
  const BytePairs pairs = Build(merges);
  EXPECT_THAT(Encode(pairs, "abc"), ElementsAre(258));
  EXPECT_THAT(Encode(pairs, "abab"), ElementsAre(257, 257));
  EXPECT_THAT(Encode(pairs, ""), ElementsAre());
}

TEST(BpeTest, AWholeTokenCanComeFirst) {
  const Merges merges = {{"a", "b"}, {"b", "c"}, {"a", "bc"}};
  EXPECT_THAT(Encode(Build(merges), "abc"), ElementsAre(256, 'c'));
  EXPECT_THAT(Encode(Build(merges, true), "abc"), ElementsAre(258));
}

TEST(BpeTest, AgreesWithTheDefinition) {
  const uint32_t seed = std::random_device{}();
  SCOPED_TRACE(testing::Message() << "seed " << seed);
  std::mt19937 random(seed);
  for (int round = 0; round < 300; ++round) {
    Merges merges;
    std::vector<std::string> known = {"a", "b", "c"};
    for (int i = 0; i < 12; ++i) {
      const std::pair merge(known[random() % known.size()], known[random() % known.size()]);
      if (std::find(merges.begin(), merges.end(), merge) != merges.end()) continue;
      merges.push_back(merge);
      known.push_back(merge.first + merge.second);
    }
    const BytePairs pairs = Build(merges);
    std::string piece;
    for (int i = random() % 40; i > 0; --i) piece += static_cast<char>('a' + random() % 3);
    ASSERT_EQ(Encode(pairs, piece), Definition(merges, piece)) << piece;
  }
}

// A quadratic algorithm would take minutes for as many equal letters.
TEST(BpeTest, LongPiecesAreNoTrap) {
  Merges merges;
  for (std::string run = "a"; run.size() < 64; run += run) merges.emplace_back(run, run);
  const BytePairs pairs = Build(merges);
  EXPECT_EQ(Encode(pairs, std::string(1 << 18, 'a')).size(), (1u << 18) / 64);
}

TEST(BpeTest, NamesWhatTheVocabularyLacks) {
  auto tokens = Tokens({});
  const absl::Status merge = BytePairs::Build(tokens, {{"a", "b"}}, false).status();
  EXPECT_EQ(merge.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(merge.message()), HasSubstr("merge 0 of \"a\" and \"b\""));
}

TEST(BpeTest, BytesWithoutATokenAreDroppedOrUnknown) {
  const Merges merges = {{"a", "b"}};
  auto tokens = Tokens(merges);
  tokens.erase("\x07");
  const auto dropping = BytePairs::Build(tokens, merges, false);
  ASSERT_TRUE(dropping.ok()) << dropping.status();
  // The bytes beside a dropped one become neighbours, and are merged.
  EXPECT_THAT(Encode(*dropping,
                     "a\x07"
                     "b"),
              ElementsAre(256));
  EXPECT_THAT(Encode(*dropping, "\x07\x07"), ElementsAre());
  EXPECT_THAT(Encode(*dropping, "\x07x\x07"), ElementsAre('x'));
  const auto naming = BytePairs::Build(tokens, merges, false, /*unknown=*/999);
  ASSERT_TRUE(naming.ok()) << naming.status();
  EXPECT_THAT(Encode(*naming,
                     "a\x07\x07"
                     "ab"),
              ElementsAre('a', 999, 999, 256));
}

}  // namespace
}  // namespace crumb::models
