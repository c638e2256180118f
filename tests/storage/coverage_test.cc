// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "storage/coverage.h"

#include <random>
#include <set>

#include "gtest/gtest.h"

namespace crumb::storage {
namespace {

using Tiles = std::set<std::pair<int, int>>;

Tiles TilesOf(const TileRange& range) {
  Tiles tiles;
  for (int layer = range.layers.begin; layer < range.layers.end; ++layer) {
    for (int head = range.heads.begin; head < range.heads.end; ++head) tiles.insert({layer, head});
  }
  return tiles;
}

TileRange RandomRange(std::mt19937& random) {
  const auto range = [&] {
    const auto begin = static_cast<uint16_t>(random() % 6);
    return IndexRange{begin, static_cast<uint16_t>(begin + 1 + random() % 4)};
  };
  return {range(), range()};
}

TEST(Coverage, SubtractLeavesExactlyTheTilesThatNoPartHolds) {
  const unsigned seed = std::random_device()();
  SCOPED_TRACE(seed);
  std::mt19937 random(seed);
  for (int round = 0; round < 2000; ++round) {
    const TileRange whole = RandomRange(random);
    std::vector<TileRange> parts(random() % 4);
    Tiles expected = TilesOf(whole);
    for (TileRange& part : parts) {
      part = RandomRange(random);
      for (const auto& tile : TilesOf(part)) expected.erase(tile);
    }
    Tiles left;
    size_t count = 0;
    for (const TileRange& piece : Subtract(whole, parts)) {
      ASSERT_GT(piece.tiles(), 0);
      const Tiles tiles = TilesOf(piece);
      count += tiles.size();
      left.insert(tiles.begin(), tiles.end());
    }
    ASSERT_EQ(left, expected);
    ASSERT_EQ(count, left.size()) << "pieces overlap";
  }
}

TEST(Coverage, DisjointPartsCoverWhenTheyHoldEveryTile) {
  const TileRange whole = {{0, 4}, {0, 8}};
  const std::vector<TileRange> halves = {{{0, 4}, {0, 4}}, {{0, 4}, {4, 8}}};
  EXPECT_TRUE(Covers(halves, whole));
  EXPECT_TRUE(Covers(halves, {{1, 2}, {3, 5}}));
  EXPECT_FALSE(Covers(std::span(halves).first(1), whole));
  EXPECT_TRUE(Covers(std::span(halves).first(1), {{0, 4}, {1, 3}}));
  EXPECT_FALSE(Covers(halves, {{0, 5}, {0, 8}}));
}

}  // namespace
}  // namespace crumb::storage
