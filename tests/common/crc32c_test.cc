// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "common/crc32c.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <string_view>
#include <vector>

#include "common/x86_crc32c.h"

namespace crumb {
namespace {

std::span<const std::byte> BytesOf(std::string_view text) {
  return std::as_bytes(std::span(text.data(), text.size()));
}

std::vector<std::byte> RandomBytes(size_t size, uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<std::byte> bytes(size);
  for (std::byte& byte : bytes) byte = static_cast<std::byte>(random());
  return bytes;
}

// Every way there is on this machine.
std::vector<X86Crc32c> Ways() {
  std::vector<X86Crc32c> ways;
  for (const X86Crc32c way : {Sse42Crc32c(), Avx512Crc32c()}) {
    if (way != nullptr) ways.push_back(way);
  }
  return ways;
}

// The check value of the CRC catalogue and the vectors of RFC 3720, B.4.
TEST(Crc32cTest, PublishedVectors) {
  EXPECT_EQ(Crc32c(BytesOf("123456789")), 0xE3069283u);
  std::vector<std::byte> zeros(32);
  EXPECT_EQ(Crc32c(zeros), 0x8A9136AAu);
  std::vector<std::byte> ones(32, std::byte{0xFF});
  EXPECT_EQ(Crc32c(ones), 0x62A8AB43u);
  EXPECT_EQ(Crc32c({}), 0u);
}

TEST(Crc32cTest, AgreesWithTheTableAtEverySizeAndAlignment) {
  const auto bytes = RandomBytes(20000, 1);
  for (size_t size : {0, 1, 7, 8, 9, 511, 1535, 1536, 1537, 3072, 4608, 9999, 19980}) {
    for (size_t begin : {0, 1, 5, 16}) {
      const auto part = std::span(bytes).subspan(begin, size);
      EXPECT_EQ(Crc32c(part), Crc32cPortable(part)) << size << " bytes from " << begin;
    }
  }
}

TEST(Crc32cTest, EveryWayAgreesWithTheTableAtEverySizeAndCopies) {
  constexpr size_t kBytes = 2200;
  const auto bytes = RandomBytes(kBytes + 16, 5);
  for (const X86Crc32c way : Ways()) {
    for (size_t size = 0; size <= kBytes; ++size) {
      const auto part = std::span(bytes).subspan(size % 16, size);
      const auto begin = static_cast<uint32_t>(size * 2654435761u);  // checksum of earlier bytes
      const uint32_t expected = Crc32cPortable(part, begin);
      ASSERT_EQ(way(nullptr, part.data(), size, begin), expected) << size;
      std::vector<std::byte> target(size + 80, std::byte{0xAA});
      ASSERT_EQ(way(target.data(), part.data(), size, begin), expected) << size;
      ASSERT_TRUE(std::equal(part.begin(), part.end(), target.begin())) << size;
      for (size_t i = size; i < target.size(); ++i) ASSERT_EQ(target[i], std::byte{0xAA}) << size;
    }
  }
}

TEST(Crc32cTest, ContinuesFromAnyCut) {
  const auto bytes = RandomBytes(5000, 2);
  const uint32_t whole = Crc32c(bytes);
  for (size_t cut : {1, 1536, 1540, 4999}) {
    const uint32_t first = Crc32c(std::span(bytes).first(cut));
    EXPECT_EQ(Crc32c(std::span(bytes).subspan(cut), first), whole);
    EXPECT_EQ(Crc32cPortable(std::span(bytes).subspan(cut), first), whole);
  }
}

TEST(Crc32cTest, EveryBitCounts) {
  auto bytes = RandomBytes(4608, 3);
  const uint32_t sum = Crc32c(bytes);
  for (size_t bit = 0; bit < bytes.size() * 8; bit += 37) {
    bytes[bit / 8] ^= std::byte{1} << (bit % 8);
    EXPECT_NE(Crc32c(bytes), sum) << "bit " << bit;
    bytes[bit / 8] ^= std::byte{1} << (bit % 8);
  }
}

TEST(Crc32cTest, CopyWritesWhatItSums) {
  for (size_t size : {0, 3, 8, 1536, 4608, 4611}) {
    const auto source = RandomBytes(size, 4);
    std::vector<std::byte> target(size + 1, std::byte{0xAA});
    EXPECT_EQ(CopyCrc32c(target.data(), source), Crc32cPortable(source));
    EXPECT_TRUE(std::equal(source.begin(), source.end(), target.begin()));
    EXPECT_EQ(target.back(), std::byte{0xAA}) << "wrote behind the end";
  }
}

}  // namespace
}  // namespace crumb
