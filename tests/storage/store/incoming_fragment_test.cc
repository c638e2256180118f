// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "storage/store/incoming_fragment.h"

#include "gtest/gtest.h"
#include "tests/storage/sample_fragment.h"

namespace crumb::storage {
namespace {

absl::StatusOr<FragmentHeader> HeaderIn(const SampleFragment& sample,
                                        std::span<const std::byte> bytes) {
  return TakeHeader(bytes.subspan(MetaOf(sample).tiles_bytes), FragmentHeaderBytes(64));
}

TEST(IncomingFragment, APieceIsAFragmentOfItsOwn) {
  SampleFragment sample = SamplePage(1, 2);
  sample.range = {{2, 6}, {1, 5}};
  const std::vector<std::byte> bytes = BytesOf(sample);
  const auto header = HeaderIn(sample, bytes);
  ASSERT_TRUE(header.ok()) << header.status();
  SampleFragment piece = sample;
  piece.range = {{3, 5}, {2, 5}};
  std::vector<std::byte> target(FragmentBytes(piece.range.tiles(), piece.tile_bytes));
  ASSERT_TRUE(CopyFragment(*header, bytes, piece.range, target).ok());
  EXPECT_EQ(target, BytesOf(piece));
}

TEST(IncomingFragment, EveryFlippedBitIsFound) {
  const SampleFragment sample = SamplePage(1, 0);
  const std::vector<std::byte> good = BytesOf(sample);
  for (size_t position = 0; position < good.size(); position += 97) {
    std::vector<std::byte> bad = good;
    bad[position] ^= std::byte{16};
    const auto header = HeaderIn(sample, bad);
    if (!header.ok()) {
      EXPECT_TRUE(absl::IsDataLoss(header.status())) << header.status();
      continue;
    }
    std::vector<std::byte> target(bad.size());
    EXPECT_TRUE(absl::IsDataLoss(CopyFragment(*header, bad, sample.range, target))) << position;
  }
}

TEST(IncomingFragment, LooksAtNoMoreThanAHeaderMayHave) {
  const SampleFragment sample = SamplePage(1, 0);
  const std::vector<std::byte> bytes = BytesOf(sample);
  const auto header = std::span(bytes).subspan(MetaOf(sample).tiles_bytes);
  EXPECT_TRUE(TakeHeader(header, header.size()).ok());
  EXPECT_TRUE(absl::IsDataLoss(TakeHeader(header, header.size() - 1).status()));
  EXPECT_TRUE(absl::IsDataLoss(TakeHeader({}, header.size()).status()));
}

TEST(IncomingFragment, RefusesTilesThatTheHeaderDoesNotName) {
  const SampleFragment sample = SamplePage(1, 0);
  const std::vector<std::byte> bytes = BytesOf(sample);
  CommitRequest request = CommitOf(sample, bytes);
  EXPECT_TRUE(CheckCommit(request).ok());
  request.tiles = request.tiles.first(request.tiles.size() - 1);
  EXPECT_TRUE(absl::IsInvalidArgument(CheckCommit(request)));
  request = CommitOf(sample, bytes);
  request.header.tile_sums.pop_back();
  EXPECT_TRUE(absl::IsInvalidArgument(CheckCommit(request)));
  request = CommitOf(sample, bytes);
  request.header.range.heads.end = request.header.range.heads.begin;
  EXPECT_TRUE(absl::IsInvalidArgument(CheckCommit(request)));
}

}  // namespace
}  // namespace crumb::storage
