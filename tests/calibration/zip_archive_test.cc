// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "calibration/zip_archive.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>
#include <sstream>

namespace crumb::calibration {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

std::span<const std::byte> Bytes(const std::string& text) { return std::as_bytes(std::span(text)); }

std::string Sample() {
  std::ostringstream out;
  ZipWriter zip(out);
  zip.Add("a/first", "some text");
  zip.Add("a/second", std::string(1000, 'x'));
  zip.Add("a/empty", "");
  zip.Finish();
  return out.str();
}

std::string ErrorOf(const std::string& bytes) {
  const auto archive = ZipArchive::Parse(Bytes(bytes), "file.pt");
  EXPECT_FALSE(archive.ok());
  EXPECT_THAT(std::string(archive.status().message()), HasSubstr("file.pt: "));
  return std::string(archive.status().message());
}

// Replaces the first occurrence after `from`.
std::string With(std::string bytes, size_t at, const std::string& what) {
  return bytes.replace(at, what.size(), what);
}

TEST(ZipArchiveTest, Crc32IsZips) {
  // The first is the check value of CRC-32/ISO-HDLC.
  EXPECT_EQ(Crc32(Bytes("123456789")), 0xcbf43926u);
  EXPECT_EQ(Crc32({}), 0u);
}

TEST(ZipArchiveTest, ReadsWhatWasWrittenAligned) {
  const std::string bytes = Sample();
  const auto archive = ZipArchive::Parse(Bytes(bytes), "file.pt");
  ASSERT_TRUE(archive.ok()) << archive.status();
  EXPECT_THAT(archive->names(), ElementsAre("a/empty", "a/first", "a/second"));
  const auto second = archive->Read("a/second");
  ASSERT_TRUE(second.ok()) << second.status();
  EXPECT_EQ(second->size(), 1000u);
  EXPECT_EQ((second->data() - Bytes(bytes).data()) % 64, 0);
  EXPECT_EQ(archive->Read("b").status().code(), absl::StatusCode::kNotFound);
}

TEST(ZipArchiveTest, EveryTruncationIsAnError) {
  const std::string bytes = Sample();
  for (size_t size = 0; size < bytes.size(); ++size) ErrorOf(bytes.substr(0, size));
}

TEST(ZipArchiveTest, DamagedBytesAreFound) {
  const std::string bytes = With(Sample(), Sample().find("some"), "Some");
  const auto archive = ZipArchive::Parse(Bytes(bytes), "file.pt");
  ASSERT_TRUE(archive.ok());
  EXPECT_EQ(archive->Read("a/first").status().code(), absl::StatusCode::kDataLoss);
}

TEST(ZipArchiveTest, HostileDirectoriesAreRefused) {
  using namespace std::string_literals;
  const std::string bytes = Sample();
  const size_t central = bytes.find("PK\x01\x02"), end64 = bytes.find("PK\x06\x06");
  const size_t second = bytes.find("PK\x01\x02", central + 4);
  const size_t zip64 = central + 46 + 7;  // the first entry's field: 4, size, size, offset
  EXPECT_THAT(ErrorOf(With(bytes, central + 10, "\x08\x00"s)), HasSubstr("compressed"));
  EXPECT_THAT(ErrorOf(With(bytes, central + 8, "\x01\x00"s)), HasSubstr("encrypted"));
  const std::string huge(8, '\xfe');
  EXPECT_THAT(ErrorOf(With(bytes, zip64 + 4, huge + huge)), HasSubstr("a/first"));
  EXPECT_THAT(ErrorOf(With(bytes, zip64 + 4, huge)), HasSubstr("sizes differ"));
  EXPECT_THAT(ErrorOf(With(bytes, zip64 + 20, huge)), HasSubstr("not where"));
  EXPECT_THAT(ErrorOf(With(bytes, zip64 + 2, "\xff\xff")), HasSubstr("ZIP64"));
  EXPECT_THAT(ErrorOf(With(bytes, end64 + 32, huge)), HasSubstr("entries, at most"));
  EXPECT_THAT(ErrorOf(With(bytes, end64 + 32, "\x09"s)), HasSubstr("3 of 9 entries"));
  EXPECT_THAT(ErrorOf(With(bytes, end64 + 40, huge)), HasSubstr("beyond the file"));
  EXPECT_THAT(ErrorOf(With(bytes, end64 + 48, huge)), HasSubstr("beyond the file"));
  // The directory record of the second entry points to the bytes of the first.
  const size_t second_offset = second + 46 + 8 + 20;
  EXPECT_THAT(ErrorOf(With(bytes, second_offset, std::string(8, '\0'))), HasSubstr("overlap"));
}

TEST(ZipArchiveTest, NoFlippedByteCrashes) {
  std::mt19937 random(12);
  const std::string bytes = Sample();
  for (int round = 0; round < 20000; ++round) {
    std::string flipped = bytes;
    for (int flips = 0; flips < 2; ++flips) {
      flipped[random() % flipped.size()] = static_cast<char>(random());
    }
    const auto archive = ZipArchive::Parse(Bytes(flipped), "file.pt");
    if (!archive.ok()) continue;
    for (const std::string& name : archive->names()) (void)archive->Read(name).ok();
  }
}

}  // namespace
}  // namespace crumb::calibration
