// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "tools/fragment_report.h"

#include <gtest/gtest.h>

#include <cstring>
#include <limits>
#include <numeric>

#include "nlohmann/json.hpp"
#include "tests/tools/sample_fragment.h"

namespace crumb::tools {
namespace {

constexpr uint32_t kSeed = 5;

TEST(FragmentReportTest, ShapesFollowFromFormatAndTileSize) {
  for (const int head_dim : {64, 128, 256}) {
    for (const int group_size : {32, 64, 128}) {
      const kernels::TileShape shape{64, head_dim, group_size};
      if (!shape.Valid()) continue;
      EXPECT_EQ(ShapeOf(SampleInt2Fragment(shape, kSeed).header), shape);
    }
    EXPECT_EQ(ShapeOf(SampleBf16Fragment(head_dim, kSeed).header)->head_dim, head_dim);
  }
  FragmentHeader header = SampleInt2Fragment({}, kSeed).header;
  header.tile_bytes += 128;
  EXPECT_FALSE(ShapeOf(header).has_value());
  header.tile_bytes -= 128;
  header.layout_id = 99;
  EXPECT_FALSE(ShapeOf(header).has_value());
}

TEST(FragmentReportTest, CountsCodesAndBoundsScales) {
  const FragmentFile fragment = SampleInt2Fragment({64, 128, 32}, kSeed);
  const FragmentReport report = InspectFragment(fragment);
  ASSERT_EQ(report.tiles.size(), 4u);
  EXPECT_EQ(report.damaged_tiles, 0);
  EXPECT_EQ(report.tiles[1].layer, 2);
  EXPECT_EQ(report.tiles[1].head, 2);
  EXPECT_EQ(report.tiles[2].layer, 3);
  EXPECT_EQ(report.tiles[2].head, 1);
  for (const TileReport& tile : report.tiles) {
    const auto rows = RowsOfTile(fragment, tile.layer, tile.head);
    ASSERT_TRUE(rows.ok()) << rows.status();
    ASSERT_EQ(rows->size(), 2u * 64 * 4);
    for (size_t part = 0; part < 2; ++part) {
      // The rows are read element by element, and their counts must agree with the report.
      std::array<uint64_t, 4> codes{};
      float least = std::numeric_limits<float>::infinity(), greatest = -least;
      double sum = 0;
      for (const TileRow& row : *rows) {
        if (static_cast<size_t>(row.part) != part) continue;
        for (const uint8_t code : row.codes) ++codes[code];
        least = std::min(least, row.scale);
        greatest = std::max(greatest, row.scale);
        sum += row.minimum;
      }
      EXPECT_EQ(tile.int2[part].codes, codes);
      EXPECT_EQ(tile.int2[part].scale.least, least);
      EXPECT_EQ(tile.int2[part].scale.greatest, greatest);
      EXPECT_NEAR(tile.int2[part].minimum.mean, sum / (64 * 4), 1e-9);
      EXPECT_EQ(tile.int2[part].non_finite, 0u);
      EXPECT_EQ(std::accumulate(codes.begin(), codes.end(), uint64_t{0}), 64u * 128);
    }
  }
}

TEST(FragmentReportTest, OneFlippedBitDamagesExactlyItsTile) {
  FragmentFile fragment = SampleInt2Fragment({}, kSeed);
  fragment.tiles[2 * 4608 + 17] ^= std::byte{4};
  const FragmentReport report = InspectFragment(fragment);
  EXPECT_EQ(report.damaged_tiles, 1);
  for (size_t i = 0; i < report.tiles.size(); ++i) EXPECT_EQ(report.tiles[i].intact(), i != 2);
  EXPECT_NE(FragmentText(report).find("DAMAGED"), std::string::npos);
}

TEST(FragmentReportTest, NonFiniteValuesAreCountedAndLeftOut) {
  FragmentFile fragment = SampleBf16Fragment(64, kSeed);
  const uint16_t infinity = 0x7f80, nan = 0x7fc1;
  std::memcpy(fragment.tiles.data() + 10, &infinity, 2);
  std::memcpy(fragment.tiles.data() + 12, &nan, 2);
  const FragmentReport report = InspectFragment(fragment);
  EXPECT_EQ(report.tiles[0].bf16[0].non_finite, 2u);
  EXPECT_EQ(report.tiles[0].bf16[1].non_finite, 0u);
  EXPECT_LE(report.tiles[0].bf16[0].value.greatest, 2.0f);
  EXPECT_GE(report.tiles[0].bf16[0].value.least, -2.0f);
}

TEST(FragmentReportTest, RowsAreRefusedForWhatIsNotThere) {
  const FragmentFile int2 = SampleInt2Fragment({}, kSeed);
  EXPECT_TRUE(RowsOfTile(int2, 3, 2).ok());
  EXPECT_FALSE(RowsOfTile(int2, 4, 1).ok());
  EXPECT_FALSE(RowsOfTile(int2, 2, 0).ok());
  EXPECT_FALSE(RowsOfTile(SampleBf16Fragment(128, kSeed), 2, 1).ok());
}

TEST(FragmentReportTest, JsonHasOneRowPerTile) {
  const nlohmann::json json = FragmentJson(InspectFragment(SampleInt2Fragment({}, kSeed)));
  EXPECT_EQ(json["format"], "int2");
  EXPECT_EQ(json["tile_bytes"], 4608);
  EXPECT_EQ(json["head_dim"], 128);
  EXPECT_EQ(json["group_size"], 128);
  EXPECT_EQ(json["layers"], nlohmann::json({2, 4}));
  EXPECT_EQ(json["key"].get<std::string>().substr(0, 4), "0505");  // filled with the seed
  ASSERT_EQ(json["rows"].size(), 4u);
  EXPECT_EQ(json["rows"][0]["k"]["codes"].size(), 4u);
  EXPECT_TRUE(json["rows"][3]["intact"].get<bool>());
  const nlohmann::json bf16 = FragmentJson(InspectFragment(SampleBf16Fragment(128, kSeed)));
  EXPECT_EQ(bf16["format"], "bf16");
  EXPECT_TRUE(bf16["group_size"].is_null());
  EXPECT_TRUE(bf16["rows"][0]["v"].contains("value"));
}

}  // namespace
}  // namespace crumb::tools
