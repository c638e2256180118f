// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "storage/ssd/index_format.h"

#include "common/hex.h"
#include "gtest/gtest.h"
#include "tests/storage/sample_fragment.h"

namespace crumb::storage {
namespace {

IndexEntry SampleEntry() {
  SampleFragment sample = SamplePage(1, 2);
  sample.range = {{3, 5}, {1, 4}};
  sample.generation = 77;
  return {MetaOf(sample), {.region = 4, .bytes = 28160, .offset = 1234944, .chunk_order = 2}};
}

std::string KeyOf(const IndexEntry& entry) {
  return FragmentKey(entry.meta.keyspace, entry.meta.key, entry.meta.range);
}

TEST(IndexFormat, EntriesComeBack) {
  const IndexEntry entry = SampleEntry();
  const auto back = DecodeIndexEntry(KeyOf(entry), EncodeIndexEntry(entry));
  ASSERT_TRUE(back.ok()) << back.status();
  EXPECT_EQ(*back, entry);
}

TEST(IndexFormat, BytesAreFrozen) {
  const std::string value = EncodeIndexEntry(SampleEntry());
  const auto* bytes = reinterpret_cast<const uint8_t*>(value.data());
  EXPECT_EQ(HexEncode({bytes, 44}),
            "01020000050004000"
            "06c0000"
            "ac6c0000"
            "007e0000"
            "04000000"
            "006e0000"
            "4d00000000000000"
            "00d8120000000000");
  EXPECT_EQ(value.size(), 84u);
  EXPECT_EQ(KeyOf(SampleEntry()).size(), 69u);
  EXPECT_EQ(KeyOf(SampleEntry())[0], 'f');
  EXPECT_EQ(HexEncode({reinterpret_cast<const uint8_t*>(KeyOf(SampleEntry()).data()) + 65, 4}),
            "03000100");
}

TEST(IndexFormat, EveryFlippedBitAndEveryCutIsFound) {
  const IndexEntry entry = SampleEntry();
  const std::string value = EncodeIndexEntry(entry);
  for (size_t i = 0; i < value.size(); ++i) {
    for (int bit = 0; bit < 8; ++bit) {
      std::string bad = value;
      bad[i] = static_cast<char>(bad[i] ^ (1 << bit));
      EXPECT_FALSE(DecodeIndexEntry(KeyOf(entry), bad).ok());
    }
    EXPECT_FALSE(DecodeIndexEntry(KeyOf(entry), value.substr(0, i)).ok());
  }
  const std::string key = KeyOf(entry);
  for (size_t i = 0; i < key.size(); ++i) {
    std::string bad = key;
    bad[i] = static_cast<char>(bad[i] ^ 1);
    // The first byte names the kind; a reader of one gets no other.
    if (i > 0) {
      EXPECT_FALSE(DecodeIndexEntry(bad, value).ok());
    }
  }
}

TEST(IndexFormat, OtherVersionsAreRefused) {
  std::string value = EncodeIndexEntry(SampleEntry());
  value[0] = 2;
  EXPECT_TRUE(absl::IsFailedPrecondition(DecodeIndexEntry(KeyOf(SampleEntry()), value).status()));
}

TEST(IndexFormat, SmallKeysComeBack) {
  const auto name = DecodeAccessKey(AccessKey(SampleKeyspace(1), SampleKey(2, 3)));
  ASSERT_TRUE(name.ok());
  EXPECT_EQ(name->first, SampleKeyspace(1));
  EXPECT_EQ(name->second, SampleKey(2, 3));
  EXPECT_EQ(*DecodeGenerationKey(GenerationKey(SampleKeyspace(4))), SampleKeyspace(4));
  EXPECT_EQ(*DecodeNumber(EncodeNumber(0x123456789abcdef0)), 0x123456789abcdef0u);
  EXPECT_FALSE(DecodeNumber("short").ok());
  EXPECT_FALSE(DecodeAccessKey("a").ok());
  EXPECT_FALSE(DecodeGenerationKey("gg").ok());
}

}  // namespace
}  // namespace crumb::storage
