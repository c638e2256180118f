// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "storage/ssd/extent_files.h"

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <random>
#include <set>

#include "gtest/gtest.h"
#include "storage/store_options.h"
#include "tests/common/temporary_folder.h"

namespace crumb::storage {
namespace {

namespace fs = std::filesystem;

class ExtentFilesTest : public testing::Test {
 protected:
  ExtentFilesTest() { Open(); }
  // Opens the folder as the next process does.
  void Open() {
    files_.reset();
    folder_.reset();
    SsdOptions options;
    options.path = place_.path();
    options.bytes_max.value = uint64_t{64} << 20;
    auto folder = SsdFolder::Open(options, std::nullopt);
    EXPECT_TRUE(folder.ok()) << folder.status();
    folder_ = *std::move(folder);
    auto files = ExtentFiles::Open(*folder_);
    EXPECT_TRUE(files.ok()) << files.status();
    files_ = *std::move(files);
  }
  std::string PathOf(uint32_t number) const {
    return folder_->extents_path() + "/0000000" + std::to_string(number) + ".extent";
  }
  // Bytes that lie `misaligned` bytes behind an aligned address.
  std::span<std::byte> Memory(size_t bytes, size_t misaligned) {
    const size_t alignment = folder_->alignment();
    memory_.assign(bytes + 2 * alignment, std::byte{0xee});
    const size_t over = reinterpret_cast<uintptr_t>(memory_.data()) % alignment;
    return std::span(memory_).subspan((over == 0 ? 0 : alignment - over) + misaligned, bytes);
  }
  static std::vector<std::byte> Random(size_t bytes, unsigned seed) {
    std::mt19937 random(seed);
    std::vector<std::byte> made(bytes);
    for (std::byte& byte : made) byte = static_cast<std::byte>(random());
    return made;
  }

  TemporaryFolder place_;
  std::unique_ptr<SsdFolder> folder_;
  std::unique_ptr<ExtentFiles> files_;
  std::vector<std::byte> memory_;
};

TEST_F(ExtentFilesTest, BytesComeBackFromAnyMemoryAndInAnySize) {
  const uint32_t extent = files_->Create().value();
  const uint64_t unit = folder_->alignment();
  uint64_t offset = 0;
  unsigned seed = 1;
  for (const size_t misaligned : {0, 1}) {
    for (const uint64_t bytes : {uint64_t{1}, unit - 1, unit, unit + 1, 5 * unit + 77}) {
      SCOPED_TRACE(testing::Message() << bytes << " bytes, misaligned by " << misaligned);
      const std::vector<std::byte> wanted = Random(bytes, seed++);
      // Room behind the bytes, as in a slot: a write may take it along.
      const uint64_t room = (bytes + unit - 1) / unit * unit;
      for (const uint64_t given : {bytes, room}) {
        const std::span<std::byte> from = Memory(given, misaligned);
        std::copy(wanted.begin(), wanted.end(), from.begin());
        ASSERT_TRUE(files_->Write(extent, offset, from, bytes).ok());
        const std::span<std::byte> to = Memory(given, misaligned);
        ASSERT_TRUE(files_->Read(extent, offset, to, bytes).ok());
        EXPECT_TRUE(std::equal(wanted.begin(), wanted.end(), to.begin()));
        EXPECT_EQ(*(to.data() + given), std::byte{0xee}) << "nothing behind the room is written";
        offset += room;
      }
    }
  }
}

TEST_F(ExtentFilesTest, NeighboursStayAsTheyAre) {
  const uint32_t extent = files_->Create().value();
  const uint64_t unit = folder_->alignment();
  const std::vector<std::byte> before = Random(3 * unit, 1);
  ASSERT_TRUE(files_->Write(extent, 0, before, before.size()).ok());
  const std::vector<std::byte> middle = Random(unit - 5, 2);
  ASSERT_TRUE(files_->Write(extent, unit, middle, middle.size()).ok());
  std::vector<std::byte> all(3 * unit);
  ASSERT_TRUE(files_->Read(extent, 0, all, all.size()).ok());
  EXPECT_TRUE(std::equal(before.begin(), before.begin() + unit, all.begin()));
  EXPECT_TRUE(std::equal(middle.begin(), middle.end(), all.begin() + unit));
  EXPECT_TRUE(std::equal(before.begin() + 2 * unit, before.end(), all.begin() + 2 * unit));
}

TEST_F(ExtentFilesTest, NumbersOfRemovedExtentsAreUsedAgain) {
  std::set<uint32_t> numbers;
  for (int i = 0; i < 3; ++i) numbers.insert(files_->Create().value());
  EXPECT_EQ(numbers, (std::set<uint32_t>{0, 1, 2}));
  EXPECT_EQ(files_->bytes(), 3 * folder_->extent_bytes());
  EXPECT_EQ(fs::file_size(PathOf(1)), folder_->extent_bytes()) << "allocated in full";
  EXPECT_TRUE(files_->Remove(1).ok());
  EXPECT_TRUE(files_->Remove(1).ok()) << "gone already";
  EXPECT_FALSE(fs::exists(PathOf(1)));
  EXPECT_EQ(files_->bytes(), 2 * folder_->extent_bytes());
  std::vector<std::byte> room(folder_->alignment());
  EXPECT_TRUE(absl::IsNotFound(files_->Read(1, 0, room, room.size())));
  EXPECT_TRUE(absl::IsNotFound(files_->Write(1, 0, room, room.size())));
  EXPECT_TRUE(absl::IsNotFound(files_->Sync(1)));
  EXPECT_EQ(files_->Create().value(), 1u);
}

TEST_F(ExtentFilesTest, AnotherProcessFindsTheBytesAndSaysWhatWasCutOff) {
  ASSERT_EQ(files_->Create().value(), 0u);
  ASSERT_EQ(files_->Create().value(), 1u);
  const uint64_t unit = folder_->alignment();
  const std::vector<std::byte> wanted = Random(unit, 1);
  ASSERT_TRUE(files_->Write(0, unit, wanted, unit).ok());
  ASSERT_TRUE(files_->Sync(0).ok());
  fs::resize_file(PathOf(1), 3 * unit);
  Open();
  ASSERT_EQ(files_->found().size(), 2u);
  for (const ExtentFiles::Extent& extent : files_->found()) {
    EXPECT_EQ(extent.intact_bytes, extent.number == 0 ? folder_->extent_bytes() : 3 * unit);
    EXPECT_EQ(extent.bytes, folder_->extent_bytes()) << "extended again";
  }
  EXPECT_EQ(files_->FindFound(0)->intact_bytes, folder_->extent_bytes());
  EXPECT_EQ(files_->FindFound(1)->intact_bytes, 3 * unit);
  EXPECT_EQ(files_->FindFound(2), nullptr);
  std::vector<std::byte> room(unit);
  ASSERT_TRUE(files_->Read(0, unit, room, unit).ok());
  EXPECT_EQ(room, wanted);
}

TEST_F(ExtentFilesTest, AFileThatEndsEarlyIsLostData) {
  ASSERT_EQ(files_->Create().value(), 0u);
  fs::resize_file(PathOf(0), folder_->alignment());
  std::vector<std::byte> room(2 * folder_->alignment());
  EXPECT_TRUE(absl::IsDataLoss(files_->Read(0, 0, room, room.size())));
}

TEST_F(ExtentFilesTest, AFileOfAnotherProgramIsLeftAlone) {
  for (const std::string name : {"notes", "00000001.extent.old", "1.extent"}) {
    const std::string path = folder_->extents_path() + "/" + name;
    std::ofstream(path) << "not ours";
    EXPECT_TRUE(absl::IsFailedPrecondition(ExtentFiles::Open(*folder_).status())) << name;
    EXPECT_EQ(fs::file_size(path), 8u);
    fs::remove(path);
  }
}

}  // namespace
}  // namespace crumb::storage
