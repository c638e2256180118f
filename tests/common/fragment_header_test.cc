// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "common/fragment_header.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "common/crc32c.h"
#include "common/hex.h"
#include "common/little_endian.h"

namespace crumb {
namespace {

FragmentHeader Example() {
  FragmentHeader header;
  header.tile_bytes = 4608;
  header.generation = 3;
  header.over_int2_prefix = true;
  header.keyspace.bytes.fill(0x11);
  header.key.bytes.fill(0x22);
  header.parent.bytes.fill(0x33);
  header.range = {{2, 4}, {1, 4}};
  header.tile_sums = {1, 2, 3, 4, 5, 0xFFFFFFFF};
  return header;
}

std::vector<std::byte> Encoded(const FragmentHeader& header) {
  std::vector<std::byte> bytes(FragmentHeaderBytes(header.range.tiles()));
  EncodeFragmentHeader(header, bytes);
  return bytes;
}

// Recomputes the checksum after a change, so that the checks behind it are tested.
void Reseal(std::vector<std::byte>& bytes) {
  StoreLittle(bytes.data() + bytes.size() - 4,
              Crc32c(std::span<const std::byte>(bytes).first(bytes.size() - 4)));
}

TEST(FragmentHeaderTest, RoundTrip) {
  const FragmentHeader header = Example();
  auto bytes = Encoded(header);
  bytes.push_back(std::byte{9});  // bytes behind the header are ignored
  const auto decoded = DecodeFragmentHeader(bytes);
  ASSERT_TRUE(decoded.ok()) << decoded.status();
  EXPECT_EQ(*decoded, header);
}

TEST(FragmentHeaderTest, OneOfNoTilesIsWrittenAndRefused) {
  const auto bytes = Encoded(FragmentHeader());
  EXPECT_EQ(bytes.size(), FragmentHeaderBytes(0));
  EXPECT_EQ(DecodeFragmentHeader(bytes).status().code(), absl::StatusCode::kDataLoss);
}

TEST(FragmentHeaderTest, AViewReadsTheSumsWhereTheyLie) {
  FragmentHeader header = Example();
  auto bytes = Encoded(header);
  const auto view = ViewFragmentHeader(bytes);
  ASSERT_TRUE(view.ok()) << view.status();
  EXPECT_TRUE(std::ranges::equal(view->tile_sums, header.tile_sums));
  const auto* first = reinterpret_cast<const std::byte*>(view->tile_sums.data());
  EXPECT_GE(first, bytes.data());
  EXPECT_LE(first + view->tile_sums.size_bytes(), bytes.data() + bytes.size());
  header.tile_sums.clear();
  EXPECT_EQ(view->header, header);
  // Truncated, flipped and misaligned ones are refused.
  for (size_t size = 0; size < bytes.size(); ++size) {
    EXPECT_TRUE(absl::IsDataLoss(ViewFragmentHeader(std::span(bytes).first(size)).status()));
  }
  for (size_t bit = 0; bit < 8 * bytes.size(); ++bit) {
    auto flipped = bytes;
    flipped[bit / 8] ^= std::byte{1} << (bit % 8);
    EXPECT_FALSE(ViewFragmentHeader(flipped).ok()) << bit;
  }
  bytes.insert(bytes.begin(), std::byte{0});
  EXPECT_TRUE(absl::IsDataLoss(ViewFragmentHeader(std::span(bytes).subspan(1)).status()));
}

TEST(FragmentHeaderTest, GoldenBytes) {
  const auto bytes = Encoded(Example());
  const std::string hex = HexEncode({reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size()});
  std::string expected =
      "43524d42"
      "0100"
      "0100"
      "ac000000"
      "02"
      "01"
      "4000"
      "01000000"
      "00120000"
      "0300000000000000";
  for (const char* digits : {"11", "22", "33"}) {
    for (int i = 0; i < 32; ++i) expected += digits;
  }
  expected +=
      "0200"
      "0400"
      "0100"
      "0400"
      "06000000"
      "00000000"
      "01000000"
      "02000000"
      "03000000"
      "04000000"
      "05000000"
      "ffffffff";
  EXPECT_EQ(hex.substr(0, expected.size()), expected);
  EXPECT_EQ(hex.size(), expected.size() + 8);
}

TEST(FragmentHeaderTest, EveryTruncationIsDataLoss) {
  const auto bytes = Encoded(Example());
  for (size_t size = 0; size < bytes.size(); ++size) {
    EXPECT_EQ(DecodeFragmentHeader(std::span(bytes).first(size)).status().code(),
              absl::StatusCode::kDataLoss)
        << size << " bytes";
  }
}

TEST(FragmentHeaderTest, EveryFlippedBitIsDataLoss) {
  auto bytes = Encoded(Example());
  for (size_t bit = 0; bit < bytes.size() * 8; ++bit) {
    bytes[bit / 8] ^= std::byte{1} << (bit % 8);
    EXPECT_EQ(DecodeFragmentHeader(bytes).status().code(), absl::StatusCode::kDataLoss)
        << "bit " << bit;
    bytes[bit / 8] ^= std::byte{1} << (bit % 8);
  }
}

TEST(FragmentHeaderTest, AFutureVersionSaysSo) {
  auto bytes = Encoded(Example());
  StoreLittle(bytes.data() + 4, uint16_t{9});
  Reseal(bytes);
  EXPECT_TRUE(DecodeFragmentHeader(bytes).ok()) << "newer, but readable by version 1";
  StoreLittle(bytes.data() + 6, uint16_t{2});
  Reseal(bytes);
  EXPECT_EQ(DecodeFragmentHeader(bytes).status().code(), absl::StatusCode::kFailedPrecondition);
}

TEST(FragmentHeaderTest, ImpossibleValuesAreRefusedBehindAValidSum) {
  const auto with = [](size_t offset, uint32_t value, size_t width) {
    auto bytes = Encoded(Example());
    std::memcpy(bytes.data() + offset, &value, width);
    Reseal(bytes);
    return DecodeFragmentHeader(bytes).status().code();
  };
  EXPECT_EQ(with(12, 7, 1), absl::StatusCode::kDataLoss) << "format";
  EXPECT_EQ(with(20, 0, 4), absl::StatusCode::kDataLoss) << "no tile bytes";
  EXPECT_EQ(with(20, kTileBytesMax + 1, 4), absl::StatusCode::kDataLoss) << "tile too large";
  EXPECT_EQ(with(14, 0, 2), absl::StatusCode::kDataLoss) << "no tokens";
  EXPECT_EQ(with(130, 2, 2), absl::StatusCode::kDataLoss) << "empty layers";
  EXPECT_EQ(with(134, 60000, 2), absl::StatusCode::kDataLoss) << "more heads than sums";
  EXPECT_EQ(with(136, 5, 4), absl::StatusCode::kDataLoss) << "tile count";
}

TEST(FragmentHeaderTest, RangesOfMoreTilesThanAnIntCountsAreRefused) {
  EXPECT_EQ((TileRange{{0, 65535}, {0, 65535}}).tiles(), INT32_MAX);
  EXPECT_EQ((TileRange{{65535, 0}, {0, 65535}}).tiles(), INT32_MIN);
  const std::vector<std::byte> whole = Encoded(Example());
  for (const uint16_t layers : {uint16_t{32768}, uint16_t{63488}, uint16_t{65535}}) {
    std::vector<std::byte> bytes = whole;
    StoreLittle(bytes.data() + 128, uint16_t{0});
    StoreLittle(bytes.data() + 130, layers);
    StoreLittle(bytes.data() + 132, uint16_t{0});
    StoreLittle(bytes.data() + 134, uint16_t{65535});
    StoreLittle(bytes.data() + 136, static_cast<uint32_t>(layers) * 65535u);
    Reseal(bytes);
    EXPECT_EQ(DecodeFragmentHeader(bytes).status().code(), absl::StatusCode::kDataLoss) << layers;
  }
}

TEST(FragmentHeaderTest, TileSums) {
  FragmentHeader header = Example();
  header.tile_bytes = 64;
  std::vector<std::byte> tiles(6 * 64);
  for (size_t i = 0; i < tiles.size(); ++i) tiles[i] = static_cast<std::byte>(i * 7);
  for (size_t i = 0; i < 6; ++i) {
    header.tile_sums[i] = Crc32c(std::span(tiles).subspan(64 * i, 64));
  }
  EXPECT_TRUE(VerifyTileSums(header, tiles).ok());
  tiles[64 * 4 + 3] ^= std::byte{16};
  const auto status = VerifyTileSums(header, tiles);
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
  EXPECT_NE(status.message().find("tile 4"), absl::string_view::npos) << status;
  EXPECT_EQ(VerifyTileSums(header, std::span(tiles).first(64)).code(), absl::StatusCode::kDataLoss);
}

TEST(TileRangeTest, Intersections) {
  EXPECT_EQ(Intersect(IndexRange{0, 4}, IndexRange{2, 8}), (IndexRange{2, 4}));
  EXPECT_EQ(Intersect(IndexRange{0, 2}, IndexRange{2, 8}).size(), 0);
  EXPECT_EQ(Intersect(TileRange{{0, 4}, {0, 2}}, TileRange{{1, 3}, {1, 4}}).tiles(), 2);
}

}  // namespace
}  // namespace crumb
