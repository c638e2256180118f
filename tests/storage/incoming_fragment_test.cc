// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "storage/incoming_fragment.h"

#include "gtest/gtest.h"
#include "tests/storage/sample_fragment.h"

namespace crumb::storage {
namespace {

TEST(IncomingFragment, APieceIsAFragmentOfItsOwn) {
  SampleFragment sample = SamplePage(1, 2);
  sample.range = {{2, 6}, {1, 5}};
  const std::vector<std::byte> bytes = BytesOf(sample);
  const auto header = ReadCommitHeader(CommitOf(sample, bytes));
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
    const auto header = ReadCommitHeader(CommitOf(sample, bad));
    if (!header.ok()) {
      EXPECT_TRUE(absl::IsDataLoss(header.status())) << header.status();
      continue;
    }
    std::vector<std::byte> target(bad.size());
    EXPECT_TRUE(absl::IsDataLoss(CopyFragment(*header, bad, sample.range, target))) << position;
  }
}

TEST(IncomingFragment, RefusesWhatTheRequestDoesNotSay) {
  const SampleFragment sample = SamplePage(1, 0);
  const std::vector<std::byte> bytes = BytesOf(sample);
  CommitRequest request = CommitOf(sample, bytes);
  request.keyspace = SampleKeyspace(9);
  EXPECT_TRUE(absl::IsInvalidArgument(ReadCommitHeader(request).status()));
  request = CommitOf(sample, bytes);
  request.generation = 2;
  EXPECT_TRUE(absl::IsInvalidArgument(ReadCommitHeader(request).status()));
  request = CommitOf(sample, bytes);
  request.tiles_bytes = static_cast<uint32_t>(bytes.size());
  EXPECT_TRUE(absl::IsInvalidArgument(ReadCommitHeader(request).status()));
  request = CommitOf(sample, bytes);
  request.fragment = request.fragment.first(bytes.size() - 1);
  EXPECT_FALSE(ReadCommitHeader(request).ok());
}

}  // namespace
}  // namespace crumb::storage
