// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "tools/fragment_file.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <random>

#include "tests/common/temporary_folder.h"
#include "tests/tools/sample_fragment.h"

namespace crumb::tools {
namespace {

using ::testing::HasSubstr;

constexpr uint32_t kSeed = 11;

TEST(FragmentFileTest, RoundTripsThroughAFile) {
  const TemporaryFolder folder;
  const FragmentFile written = SampleInt2Fragment({}, kSeed);
  ASSERT_TRUE(WriteFragmentFile(folder.File("page"), written.header, written.tiles).ok());
  const auto read = ReadFragmentFile(folder.File("page"));
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_EQ(read->header, written.header);
  EXPECT_EQ(read->tiles, written.tiles);
}

TEST(FragmentFileTest, EveryTruncationIsRefused) {
  const std::vector<std::byte> whole = EncodeFragment(SampleInt2Fragment({64, 64, 64}, kSeed));
  std::mt19937 random(kSeed);
  SCOPED_TRACE(testing::Message() << "seed " << kSeed);
  for (int i = 0; i < 200; ++i) {
    // Half of the cuts are in the header.
    const size_t range = i % 2 == 0 ? 200 : whole.size();
    const size_t cut = 1 + random() % (range - 1);
    const auto parsed = ParseFragment({whole.begin(), whole.end() - static_cast<ptrdiff_t>(cut)});
    EXPECT_EQ(parsed.status().code(), absl::StatusCode::kDataLoss) << "cut " << cut;
  }
  EXPECT_FALSE(ParseFragment({}).ok());
}

TEST(FragmentFileTest, EveryFlippedBitOfTheHeaderIsRefused) {
  const FragmentFile fragment = SampleInt2Fragment({64, 64, 64}, kSeed);
  const std::vector<std::byte> whole = EncodeFragment(fragment);
  for (size_t at = fragment.tiles.size(); at < whole.size(); ++at) {
    std::vector<std::byte> damaged = whole;
    damaged[at] ^= static_cast<std::byte>(1 << at % 8);
    EXPECT_FALSE(ParseFragment(damaged).ok()) << "byte " << at;
  }
}

TEST(FragmentFileTest, MissingTilesAreNamed) {
  const std::vector<std::byte> whole = EncodeFragment(SampleInt2Fragment({}, kSeed));
  const auto parsed = ParseFragment({whole.begin() + 4608, whole.end()});
  EXPECT_EQ(parsed.status().code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(std::string(parsed.status().message()), HasSubstr("4 tiles of 4608 bytes"));
}

TEST(FragmentFileTest, TilesThatLookLikeHeadersDoNotConfuse) {
  FragmentFile fragment = SampleInt2Fragment({}, kSeed);
  constexpr char kMagic[] = {'C', 'R', 'M', 'B'};
  for (size_t at = 0; at + 4 <= fragment.tiles.size(); at += 4) {
    std::memcpy(fragment.tiles.data() + at, kMagic, 4);
  }
  const auto parsed = ParseFragment(EncodeFragment(fragment));
  ASSERT_TRUE(parsed.ok()) << parsed.status();
  EXPECT_EQ(parsed->header, fragment.header);
}

TEST(FragmentFileTest, ErrorsNameTheFile) {
  const TemporaryFolder folder;
  const auto absent = ReadFragmentFile(folder.File("absent"));
  EXPECT_EQ(absent.status().code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(absent.status().message()), HasSubstr("absent"));
  std::ofstream(folder.File("text")) << "not a fragment";
  const auto text = ReadFragmentFile(folder.File("text"));
  EXPECT_EQ(text.status().code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(std::string(text.status().message()), HasSubstr("text"));
  EXPECT_FALSE(WriteFragmentFile(folder.File("no/folder"), {}, {}).ok());
}

}  // namespace
}  // namespace crumb::tools
