// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "kernels/tile_codec.h"

#include <algorithm>
#include <iterator>
#include <vector>

#include "gtest/gtest.h"
#include "tests/kernels/shapes.h"

namespace crumb::kernels {
namespace {

TEST(TileShape, SizesOfTheLayoutTable) {
  EXPECT_EQ((TileShape{64, 64, 64}.int2_bytes()), 2560u);
  EXPECT_EQ((TileShape{64, 64, 32}.int2_bytes()), 3072u);
  EXPECT_EQ((TileShape{64, 128, 128}.int2_bytes()), 4608u);
  EXPECT_EQ((TileShape{64, 128, 64}.int2_bytes()), 5120u);
  EXPECT_EQ((TileShape{64, 128, 32}.int2_bytes()), 6144u);
  EXPECT_EQ((TileShape{64, 256, 128}.int2_bytes()), 9216u);
  EXPECT_EQ((TileShape{64, 256, 64}.int2_bytes()), 10240u);
  EXPECT_EQ((TileShape{64, 256, 32}.int2_bytes()), 12288u);
  for (const TileShape& shape : AllShapes()) EXPECT_EQ(shape.int2_bytes() % 128, 0u) << Name(shape);
  EXPECT_FALSE((TileShape{64, 64, 128}.Valid()));
  EXPECT_FALSE((TileShape{48, 128, 128}.Valid()));
  EXPECT_FALSE((TileShape{64, 96, 32}.Valid()));
}

// Every bit of a tile belongs to exactly one code, scale or minimum.
TEST(TileCodec, CoversEveryBitOnce) {
  for (const TileShape& shape : AllShapes()) {
    SCOPED_TRACE(Name(shape));
    std::vector<int> uses(shape.int2_bytes() * 8, 0);
    for (const TilePart part : {TilePart::kKey, TilePart::kValue}) {
      for (int t = 0; t < shape.tokens; ++t) {
        for (int ch = 0; ch < shape.head_dim; ++ch) {
          const CodePosition at = CodePositionOf(shape, part, t, ch);
          ASSERT_EQ(at.word_offset % 4, 0u);
          for (int bit = at.bit; bit < at.bit + 2; ++bit) uses.at(8 * at.word_offset + bit)++;
        }
        for (int y = 0; y < shape.groups(); ++y) {
          const size_t at = MetaOffsetOf(shape, part, t, y);
          for (int bit = 0; bit < 32; ++bit) uses.at(8 * at + bit)++;
        }
      }
    }
    for (size_t bit = 0; bit < uses.size(); ++bit) ASSERT_EQ(uses[bit], 1) << "bit " << bit;
  }
}

// Positions were worked out by hand from the text of docs/formats/page-tile.md, for 64 x 128 and
// one group.
TEST(TileCodec, PositionsByHand) {
  const TileShape shape{64, 128, 128};
  const auto expect = [&](TilePart part, int t, int ch, size_t word, int bit) {
    const CodePosition at = CodePositionOf(shape, part, t, ch);
    EXPECT_EQ(at.word_offset, word) << t << ", " << ch;
    EXPECT_EQ(at.bit, bit) << t << ", " << ch;
  };
  expect(TilePart::kKey, 0, 0, 0, 0);
  expect(TilePart::kKey, 0, 1, 0, 16);
  expect(TilePart::kKey, 0, 2, 16, 0);
  expect(TilePart::kKey, 0, 8, 0, 2);
  expect(TilePart::kKey, 8, 0, 4, 0);
  expect(TilePart::kKey, 1, 0, 64, 0);
  expect(TilePart::kKey, 0, 64, 8, 0);
  expect(TilePart::kKey, 63, 127, 3 * 512 + 31 * 16 + 12, 30);
  expect(TilePart::kValue, 0, 0, 2048, 0);
  expect(TilePart::kValue, 1, 0, 2048, 16);
  expect(TilePart::kValue, 2, 0, 2064, 0);
  expect(TilePart::kValue, 8, 0, 2052, 0);
  expect(TilePart::kValue, 0, 1, 2112, 0);
  expect(TilePart::kValue, 0, 8, 2048, 2);
  expect(TilePart::kValue, 63, 127, 2048 + 3 * 512 + 31 * 16 + 12, 30);
  EXPECT_EQ(MetaOffsetOf(shape, TilePart::kKey, 0, 0), 4096u);
  EXPECT_EQ(MetaOffsetOf(shape, TilePart::kKey, 8, 0), 4100u);
  EXPECT_EQ(MetaOffsetOf(shape, TilePart::kKey, 17, 0), 4096u + 32 + 8);
  EXPECT_EQ(MetaOffsetOf(shape, TilePart::kValue, 63, 0), 4352u + 7 * 32 + 28);
}

struct Golden {
  TileShape shape;
  uint64_t digest;
};

// Tiles have a fixed pattern of codes and halves; the digests come from another program.
TEST(TileCodec, GoldenBytes) {
  const Golden goldens[] = {{{64, 128, 128}, 0xc1cf47d857a6b292u},
                            {{64, 64, 32}, 0x3a763192202412fdu},
                            {{64, 256, 64}, 0x466176273e263e08u},
                            {{32, 128, 64}, 0x5733f62279ecf9b8u},
                            {{128, 128, 32}, 0x440d2d2a1dd4f549u}};
  for (const Golden& golden : goldens) {
    const TileShape& shape = golden.shape;
    SCOPED_TRACE(Name(shape));
    std::vector<uint8_t> tile(shape.int2_bytes(), 0xff);
    for (int t = 0; t < shape.tokens; ++t) {
      for (int c = 0; c < shape.head_dim; ++c) {
        const int k = (7 * t + 3 * c + t * c / 5) % 4, v = (5 * t + c + t * c / 3 + 1) % 4;
        WriteCode(shape, TilePart::kKey, t, c, static_cast<uint8_t>(k), tile.data());
        WriteCode(shape, TilePart::kValue, t, c, static_cast<uint8_t>(v), tile.data());
      }
      for (int y = 0; y < shape.groups(); ++y) {
        const RowMeta k{static_cast<uint16_t>(37 * t + 11 * y + 1),
                        static_cast<uint16_t>(41 * t + 13 * y + 2)};
        const RowMeta v{static_cast<uint16_t>(43 * t + 17 * y + 3),
                        static_cast<uint16_t>(47 * t + 19 * y + 4)};
        WriteMeta(shape, TilePart::kKey, t, y, k, tile.data());
        WriteMeta(shape, TilePart::kValue, t, y, v, tile.data());
      }
    }
    EXPECT_EQ(Fnv1a(tile.data(), tile.size()), golden.digest);
    const uint8_t first[] = {0x00, 0x00, 0xff, 0xff, 0x90, 0x43, 0xe4, 0x93};
    if (shape == TileShape{64, 128, 128}) {
      EXPECT_TRUE(std::equal(std::begin(first), std::end(first), tile.begin()));
    }
    EXPECT_EQ(ReadCode(shape, tile.data(), TilePart::kKey, 13, 7), (7 * 13 + 21 + 91 / 5) % 4);
    EXPECT_EQ(ReadMeta(shape, tile.data(), TilePart::kValue, 9, 0).minimum, 47 * 9 + 4);
  }
}

}  // namespace
}  // namespace crumb::kernels
