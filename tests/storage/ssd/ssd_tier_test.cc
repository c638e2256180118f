// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "storage/ssd/ssd_tier.h"

#include <fcntl.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <random>
#include <thread>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/common/fake_clock.h"
#include "tests/common/temporary_folder.h"
#include "tests/storage/store_calls.h"

namespace crumb::storage {
namespace {

namespace fs = std::filesystem;

class SsdTierTest : public testing::Test {
 protected:
  SsdTierTest() {
    options_.path = folder_.path() + "/ssd";
    options_.bytes_max = ByteSize{uint64_t{32} << 20};
    options_.policy = "lru";
  }

  absl::Status Open() {
    tier_.reset();
    auto opened = SsdTier::Open(options_, clock_, {});
    if (opened.ok()) tier_ = *std::move(opened);
    return opened.status();
  }
  // Turns encryption on, with a key of 32 times `digit`.
  void UseKey(char digit) {
    options_.key_file = folder_.path() + "/key";
    std::ofstream(options_.key_file) << std::string(64, digit) << "\n";
  }
  // Whether the bytes are anywhere in the extents.
  bool OnDisk(std::span<const std::byte> bytes) {
    const std::string wanted(reinterpret_cast<const char*>(bytes.data()), bytes.size());
    for (const fs::path& file : FilesIn("extents", ".extent")) {
      std::ifstream in(file, std::ios::binary);
      const std::string content(std::istreambuf_iterator<char>(in), {});
      if (content.find(wanted) != std::string::npos) return true;
    }
    return false;
  }
  std::vector<absl::Status> PutPages(uint64_t sequence, uint64_t first, uint64_t count) {
    std::vector<std::vector<std::byte>> bytes;
    std::vector<FragmentWrite> writes;
    for (uint64_t i = first; i < first + count; ++i)
      bytes.push_back(BytesOf(SamplePage(sequence, i)));
    for (uint64_t i = 0; i < count; ++i) {
      writes.push_back({MetaOf(SamplePage(sequence, first + i)), bytes[i]});
    }
    return tier_->Put(writes);
  }
  absl::Status Get(const SampleFragment& sample) {
    const FragmentMeta meta = MetaOf(sample);
    std::vector<std::byte> room((meta.bytes + 511) / 512 * 512);
    const absl::Status status = tier_->Get(meta, room);
    if (status.ok() && !IsRight(room, meta.keyspace, meta.key, meta.tiles_bytes)) {
      ADD_FAILURE() << "wrong bytes were served";
    }
    return status;
  }
  StoreStats Stats() const {
    StoreStats stats;
    tier_->AddStats(stats);
    return stats;
  }
  std::vector<fs::path> FilesIn(const std::string& name, const std::string& extension) const {
    std::vector<fs::path> files;
    for (const auto& entry : fs::directory_iterator(options_.path + "/" + name)) {
      if (entry.path().extension() == extension) files.push_back(entry.path());
    }
    return files;
  }
  void FlipByte(const fs::path& file, uint64_t offset) {
    std::fstream stream(file, std::ios::in | std::ios::out | std::ios::binary);
    stream.seekg(static_cast<std::streamoff>(offset));
    const int byte = stream.get();
    stream.seekp(static_cast<std::streamoff>(offset));
    stream.put(static_cast<char>(byte ^ 0x20));
  }

  TemporaryFolder folder_{TemporaryFolder::Place::kMemory};
  SsdOptions options_;
  FakeClock clock_;
  std::unique_ptr<FragmentTier> tier_;
};

MATCHER(IsOk, "") { return arg.ok(); }

TEST_F(SsdTierTest, ComesBackAsItWas) {
  ASSERT_TRUE(Open().ok());
  ASSERT_THAT(PutPages(1, 0, 100), testing::Each(IsOk()));
  ASSERT_TRUE(tier_->PutRecord("node", "me").ok());
  const PageKey gone = SampleKey(1, 99);
  ASSERT_EQ(tier_->Remove(SampleKeyspace(0), std::span(&gone, 1)).value(), 1u);
  const uint64_t resident = Stats().ssd.resident_bytes;
  ASSERT_TRUE(Open().ok());
  EXPECT_EQ(Stats().recovered_pages, 99u);
  EXPECT_EQ(Stats().discarded_pages, 0u);
  EXPECT_EQ(Stats().ssd.resident_bytes, resident);
  for (uint64_t i = 0; i < 99; ++i) EXPECT_TRUE(Get(SamplePage(1, i)).ok()) << i;
  EXPECT_TRUE(absl::IsNotFound(Get(SamplePage(1, 99))));
  EXPECT_THAT(*tier_->Records(), testing::ElementsAre(testing::Pair("node", "me")));
}

TEST_F(SsdTierTest, RecencySurvivesARestart) {
  ASSERT_TRUE(Open().ok());
  for (uint64_t i = 0; i < 200; ++i) ASSERT_THAT(PutPages(i, 0, 1), testing::Each(IsOk()));
  const std::vector<PageKey> used = {SampleKey(3, 0), SampleKey(5, 0)};
  tier_->Touch(SampleKeyspace(0), used);
  ASSERT_TRUE(Open().ok());
  // New pages push out the least recently used ones first.
  uint64_t next = 1000;
  while (!tier_->Find(SampleKeyspace(0), SampleKey(10, 0)).empty()) {
    ASSERT_THAT(PutPages(next++, 0, 16), testing::Each(IsOk()));
    ASSERT_LT(next, 3000u);
  }
  EXPECT_TRUE(tier_->Find(SampleKeyspace(0), SampleKey(0, 0)).empty());
  EXPECT_TRUE(Get(SamplePage(3, 0)).ok());
  EXPECT_TRUE(Get(SamplePage(5, 0)).ok());
  EXPECT_TRUE(Get(SamplePage(199, 0)).ok());
}

TEST_F(SsdTierTest, FlippedBitsAreMissesAndThePageGoes) {
  const unsigned seed = std::random_device()();
  SCOPED_TRACE(seed);
  std::mt19937 random(seed);
  ASSERT_TRUE(Open().ok());
  ASSERT_THAT(PutPages(1, 0, 60), testing::Each(IsOk()));
  tier_.reset();
  const auto extents = FilesIn("extents", ".extent");
  ASSERT_FALSE(extents.empty());
  const uint64_t written = 60 * MetaOf(SamplePage(1, 0)).bytes;
  for (int i = 0; i < 40; ++i) FlipByte(extents[0], random() % written);
  ASSERT_TRUE(Open().ok());
  uint64_t damaged = 0;
  for (uint64_t i = 0; i < 60; ++i) {
    const absl::Status status = Get(SamplePage(1, i));
    if (status.ok()) continue;
    EXPECT_TRUE(absl::IsDataLoss(status)) << status;
    EXPECT_TRUE(absl::IsNotFound(Get(SamplePage(1, i))));
    ++damaged;
  }
  EXPECT_GT(damaged, 0u);
  EXPECT_LE(damaged, 40u);
  EXPECT_EQ(Stats().verify_failures_ssd, damaged);
  EXPECT_EQ(Stats().ssd.evicted.corrupt, damaged);
  ASSERT_TRUE(Open().ok());
  EXPECT_EQ(Stats().recovered_pages, 60 - damaged);
}

// Whole fragments with right sums in places where the index says others are.
TEST_F(SsdTierTest, PagesOfAnotherKeyOrKeyspaceAreMissesAndCounted) {
  ASSERT_TRUE(Open().ok());
  ASSERT_THAT(PutPages(1, 0, 8), testing::Each(IsOk()));
  SampleFragment foreign = SamplePage(1, 3);
  foreign.keyspace = SampleKeyspace(1);
  const std::pair<SampleFragment, SampleFragment> placed[] = {
      {SamplePage(1, 2), SamplePage(1, 6)},  // another page of the keyspace
      {SamplePage(1, 3), foreign}};          // the same page of another keyspace
  for (const auto& [victim, other] : placed) {
    const std::vector<std::byte> at = BytesOf(victim);
    const std::vector<std::byte> with = BytesOf(other);
    ASSERT_EQ(at.size(), with.size());
    int written = 0;
    for (const fs::path& file : FilesIn("extents", ".extent")) {
      std::fstream stream(file, std::ios::in | std::ios::out | std::ios::binary);
      const std::string content(std::istreambuf_iterator<char>(stream), {});
      const std::string wanted(reinterpret_cast<const char*>(at.data()), at.size());
      const size_t found = content.find(wanted);
      if (found == std::string::npos) continue;
      stream.seekp(static_cast<std::streamoff>(found));
      stream.write(reinterpret_cast<const char*>(with.data()),
                   static_cast<std::streamsize>(with.size()));
      ++written;
    }
    ASSERT_EQ(written, 1);
  }
  const uint64_t failures = Stats().verify_failures_ssd;
  EXPECT_TRUE(absl::IsDataLoss(Get(SamplePage(1, 2))));
  EXPECT_TRUE(absl::IsDataLoss(Get(SamplePage(1, 3))));
  EXPECT_EQ(Stats().verify_failures_ssd, failures + 2);
  for (const uint64_t number : {0, 1, 4, 5, 6, 7}) EXPECT_TRUE(Get(SamplePage(1, number)).ok());
}

TEST_F(SsdTierTest, ATruncatedExtentCostsOnlyWhatWasInIt) {
  ASSERT_TRUE(Open().ok());
  ASSERT_THAT(PutPages(1, 0, 100), testing::Each(IsOk()));
  tier_.reset();
  fs::resize_file(FilesIn("extents", ".extent")[0], 600000);
  ASSERT_TRUE(Open().ok());
  const uint64_t left = Stats().recovered_pages;
  EXPECT_GT(left, 0u);
  EXPECT_LT(left, 100u);
  EXPECT_GT(Stats().discarded_pages, 0u);
  uint64_t served = 0;
  for (uint64_t i = 0; i < 100; ++i) served += Get(SamplePage(1, i)).ok();
  EXPECT_EQ(served, left);
  EXPECT_THAT(PutPages(2, 0, 100), testing::Each(IsOk()));
}

TEST_F(SsdTierTest, ATruncationWhileOpenIsAMiss) {
  ASSERT_TRUE(Open().ok());
  ASSERT_THAT(PutPages(1, 0, 10), testing::Each(IsOk()));
  for (const auto& extent : FilesIn("extents", ".extent")) fs::resize_file(extent, 4096);
  EXPECT_TRUE(absl::IsDataLoss(Get(SamplePage(1, 9))));
  EXPECT_TRUE(absl::IsNotFound(Get(SamplePage(1, 9))));
}

TEST_F(SsdTierTest, AMissingExtentIsNoError) {
  ASSERT_TRUE(Open().ok());
  ASSERT_THAT(PutPages(1, 0, 100), testing::Each(IsOk()));
  tier_.reset();
  for (const auto& extent : FilesIn("extents", ".extent")) fs::remove(extent);
  ASSERT_TRUE(Open().ok());
  EXPECT_EQ(Stats().recovered_pages, 0u);
  EXPECT_THAT(PutPages(1, 0, 100), testing::Each(IsOk()));
  EXPECT_TRUE(Get(SamplePage(1, 50)).ok());
}

TEST_F(SsdTierTest, ADamagedIndexIsSetAsideAndTheTierStarts) {
  const unsigned seed = std::random_device()();
  SCOPED_TRACE(seed);
  std::mt19937 random(seed);
  for (int round = 0; round < 6; ++round) {
    ASSERT_TRUE(Open().ok());
    ASSERT_THAT(PutPages(static_cast<uint64_t>(round), 0, 50), testing::Each(IsOk()));
    ASSERT_TRUE(Open().ok());  // the log becomes a table
    tier_.reset();
    const char* extension = round % 2 == 0 ? ".sst" : "";
    const auto files = round == 5 ? std::vector<fs::path>{options_.path + "/index/CURRENT"}
                                  : FilesIn("index", extension);
    ASSERT_FALSE(files.empty());
    for (const auto& file : files) {
      if (file.filename() == "LOCK" || file.filename() == "IDENTITY") continue;
      const uint64_t size = fs::file_size(file);
      for (int i = 0; i < 64 && size > 0; ++i) FlipByte(file, random() % size);
    }
    const absl::Status status = Open();
    ASSERT_TRUE(status.ok()) << status;
    for (uint64_t i = 0; i < 50; ++i) (void)Get(SamplePage(static_cast<uint64_t>(round), i));
    EXPECT_THAT(PutPages(100 + static_cast<uint64_t>(round), 0, 50), testing::Each(IsOk()));
    EXPECT_TRUE(Get(SamplePage(100 + static_cast<uint64_t>(round), 7)).ok());
  }
  EXPECT_TRUE(fs::exists(options_.path + "/index.damaged"));
}

TEST_F(SsdTierTest, AMissingTableIsADamagedIndex) {
  ASSERT_TRUE(Open().ok());
  ASSERT_THAT(PutPages(1, 0, 50), testing::Each(IsOk()));
  ASSERT_TRUE(Open().ok());
  tier_.reset();
  for (const auto& table : FilesIn("index", ".sst")) fs::remove(table);
  ASSERT_TRUE(Open().ok());
  EXPECT_EQ(Stats().recovered_pages, 0u);
  EXPECT_THAT(PutPages(1, 0, 50), testing::Each(IsOk()));
}

TEST_F(SsdTierTest, NeverTakesMoreThanItsBudget) {
  ASSERT_TRUE(Open().ok());
  std::atomic<bool> done = false;
  uint64_t most = 0;
  std::thread poller([&] {
    while (!done) most = std::max(most, DiskBytesOf(options_.path));
  });
  std::mt19937 random(7);
  const uint64_t pages = 2 * options_.bytes_max.value / MetaOf(SamplePage(1, 0)).bytes;
  for (uint64_t i = 0; i < pages; i += 40) {
    ASSERT_THAT(PutPages(i, 0, 40), testing::Each(IsOk()));
    const std::vector<PageKey> used = {SampleKey(random() % (i + 1) / 40 * 40, 0)};
    tier_->Touch(SampleKeyspace(0), used);
    if (i % 400 == 0) {
      ASSERT_TRUE(tier_->Sync().ok());
    }
  }
  done = true;
  poller.join();
  EXPECT_LE(most, options_.bytes_max.value);
  EXPECT_GT(most, options_.bytes_max.value / 2) << "the poller saw nothing";
  EXPECT_GT(Stats().ssd.evicted.capacity, 0u);
}

TEST_F(SsdTierTest, ASmallerBudgetTakesEffectAtTheNextStart) {
  ASSERT_TRUE(Open().ok());
  for (uint64_t i = 0; i < 16; ++i) ASSERT_THAT(PutPages(i, 0, 64), testing::Each(IsOk()));
  EXPECT_GT(DiskBytesOf(options_.path), uint64_t{18} << 20);
  options_.bytes_max = ByteSize{uint64_t{18} << 20};
  ASSERT_TRUE(Open().ok());
  EXPECT_LE(DiskBytesOf(options_.path), uint64_t{18} << 20);
  EXPECT_GT(Stats().ssd.pages, 0u);
  EXPECT_THAT(PutPages(99, 0, 10), testing::Each(IsOk()));
}

TEST_F(SsdTierTest, WithAKeyPageBytesAreNowhereOnDisk) {
  const std::vector<std::byte> bytes = BytesOf(SamplePage(1, 3));
  ASSERT_TRUE(Open().ok());
  ASSERT_THAT(PutPages(1, 0, 8), testing::Each(IsOk()));
  EXPECT_TRUE(OnDisk(std::span(bytes).first(64)));  // the search finds bytes that are there
  tier_.reset();
  fs::remove_all(options_.path);

  UseKey('a');
  ASSERT_TRUE(Open().ok());
  ASSERT_THAT(PutPages(1, 0, 8), testing::Each(IsOk()));
  EXPECT_FALSE(OnDisk(std::span(bytes).first(64)));
  EXPECT_FALSE(OnDisk(std::span(bytes).last(64)));
  ASSERT_TRUE(Open().ok());
  for (uint64_t i = 0; i < 8; ++i) EXPECT_TRUE(Get(SamplePage(1, i)).ok()) << i;
}

TEST_F(SsdTierTest, EncryptedPagesThatWereTamperedWithAreMisses) {
  UseKey('b');
  ASSERT_TRUE(Open().ok());
  ASSERT_THAT(PutPages(1, 0, 2), testing::Each(IsOk()));
  ASSERT_EQ(FilesIn("extents", ".extent").size(), 1u);
  FlipByte(FilesIn("extents", ".extent")[0], 100);
  EXPECT_TRUE(absl::IsDataLoss(Get(SamplePage(1, 0))));
  EXPECT_TRUE(absl::IsNotFound(Get(SamplePage(1, 0))));
  EXPECT_TRUE(Get(SamplePage(1, 1)).ok());
  EXPECT_EQ(Stats().verify_failures_ssd, 1u);
}

TEST_F(SsdTierTest, AFolderBelongsToItsKey) {
  const auto refused = [&](const std::string& why) {
    const absl::Status status = Open();
    EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
    EXPECT_THAT(std::string(status.message()), testing::HasSubstr(why));
  };
  UseKey('c');
  ASSERT_TRUE(Open().ok());
  tier_.reset();
  UseKey('d');
  refused("another key");
  options_.key_file.clear();
  refused("is encrypted: set ssd.key_file");
  UseKey('c');
  EXPECT_TRUE(Open().ok());
  tier_.reset();
  options_.path += "-plain";
  options_.key_file.clear();
  ASSERT_TRUE(Open().ok());
  tier_.reset();
  UseKey('c');
  refused("is not encrypted");
  options_.key_file = folder_.path() + "/absent";
  EXPECT_TRUE(absl::IsNotFound(Open()));
  options_.key_file = folder_.path() + "/short";
  std::ofstream(options_.key_file) << "abc";
  EXPECT_TRUE(absl::IsInvalidArgument(Open()));
}

TEST_F(SsdTierTest, KeepsASecondProcessOut) {
  ASSERT_TRUE(Open().ok());
  const auto second = SsdTier::Open(options_, clock_, {});
  ASSERT_TRUE(absl::IsFailedPrecondition(second.status())) << second.status();
  EXPECT_THAT(std::string(second.status().message()), testing::HasSubstr("in use"));
}

TEST_F(SsdTierTest, LeavesFoldersOfOthersAlone) {
  fs::create_directories(options_.path);
  std::ofstream(options_.path + "/thesis.tex") << "precious";
  const absl::Status status = Open();
  EXPECT_TRUE(absl::IsFailedPrecondition(status));
  EXPECT_THAT(std::string(status.message()), testing::HasSubstr("thesis.tex"));
  EXPECT_EQ(std::distance(fs::directory_iterator(options_.path), fs::directory_iterator()), 1);
}

TEST_F(SsdTierTest, RefusesFormatsItDoesNotKnow) {
  ASSERT_TRUE(Open().ok());
  tier_.reset();
  FlipByte(options_.path + "/FORMAT", 20);
  EXPECT_THAT(std::string(Open().message()), testing::HasSubstr("damaged"));
  FlipByte(options_.path + "/FORMAT", 20);
  EXPECT_TRUE(Open().ok());
  tier_.reset();
  FlipByte(options_.path + "/FORMAT", 0);
  EXPECT_TRUE(absl::IsFailedPrecondition(Open()));
  fs::remove(options_.path + "/FORMAT");
  EXPECT_THAT(std::string(Open().message()), testing::HasSubstr("FORMAT"));
  EXPECT_FALSE(FilesIn("index", "").empty()) << "nothing is deleted";
}

// A file system of our own, where the tests may mount one.
class SsdTierOnSmallDiskTest : public SsdTierTest {
 protected:
  void Mount(const std::string& options) {
    fs::create_directories(options_.path);
    if (::mount("none", options_.path.c_str(), "tmpfs", 0, options.c_str()) != 0) {
      GTEST_SKIP() << "needs the right to mount, as root has it";
    }
    mounted_ = true;
  }
  std::string ballast() const { return options_.path + "/lost+found"; }
  // Takes all room that is left.
  void Fill() const {
    std::ofstream file(ballast(), std::ios::binary);
    const std::vector<char> block(4096);
    while (file.write(block.data(), static_cast<std::streamsize>(block.size())).flush()) {
    }
  }
  ~SsdTierOnSmallDiskTest() override {
    tier_.reset();
    if (mounted_) ::umount2(options_.path.c_str(), MNT_DETACH);
  }
  bool mounted_ = false;
};

TEST_F(SsdTierOnSmallDiskTest, AFullDiskMakesItReadOnlyUntilThereIsRoom) {
  Mount("size=20m");
  if (IsSkipped()) return;
  ASSERT_TRUE(Open().ok());
  ASSERT_THAT(PutPages(1, 0, 20), testing::Each(IsOk()));
  Fill();
  bool refused = false;
  for (uint64_t i = 2; i < 400 && !refused; ++i) {
    refused = absl::IsUnavailable(PutPages(i, 0, 20)[0]);
  }
  ASSERT_TRUE(refused);
  EXPECT_THAT(Stats().ssd.state, testing::StartsWith("read-only: "));
  fs::remove(ballast());
  EXPECT_TRUE(absl::IsUnavailable(PutPages(1000, 0, 1)[0])) << "not before its time";
  clock_.Advance(std::chrono::minutes(6));
  EXPECT_THAT(PutPages(1000, 0, 5), testing::Each(IsOk()));
  EXPECT_EQ(Stats().ssd.state, "active");
  EXPECT_TRUE(Get(SamplePage(1000, 3)).ok());
}

TEST_F(SsdTierOnSmallDiskTest, ATierOnAFullDiskOpensReadOnly) {
  Mount("size=20m");
  if (IsSkipped()) return;
  ASSERT_TRUE(Open().ok());
  ASSERT_THAT(PutPages(1, 0, 20), testing::Each(IsOk()));
  tier_.reset();
  Fill();
  ASSERT_TRUE(Open().ok());
  EXPECT_THAT(Stats().ssd.state, testing::StartsWith("read-only: "));
  for (uint64_t j = 0; j < 20; ++j) EXPECT_TRUE(Get(SamplePage(1, j)).ok()) << j;
  EXPECT_TRUE(absl::IsUnavailable(tier_->PutRecord("name", "value")));
  fs::remove(ballast());
  clock_.Advance(std::chrono::minutes(6));
  EXPECT_THAT(PutPages(2, 0, 5), testing::Each(IsOk()));
  EXPECT_EQ(Stats().ssd.state, "active");
  tier_.reset();
  ASSERT_TRUE(Open().ok());
  EXPECT_TRUE(Get(SamplePage(1, 19)).ok());
  EXPECT_TRUE(Get(SamplePage(2, 4)).ok());
}

TEST_F(SsdTierOnSmallDiskTest, ANewTierOnAFullDiskIsAClearError) {
  Mount("size=20m");
  if (IsSkipped()) return;
  ASSERT_TRUE(Open().ok());
  tier_.reset();
  fs::remove_all(options_.path + "/index");
  Fill();
  const absl::Status status = Open();
  EXPECT_TRUE(absl::IsResourceExhausted(status)) << status;
}

TEST_F(SsdTierOnSmallDiskTest, AReadOnlyFolderIsAClearError) {
  Mount("size=32m");
  if (IsSkipped()) return;
  ASSERT_TRUE(Open().ok());
  tier_.reset();
  ASSERT_EQ(::mount("none", options_.path.c_str(), "tmpfs", MS_REMOUNT | MS_RDONLY, nullptr), 0);
  const absl::Status status = Open();
  EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
  EXPECT_THAT(std::string(status.message()), testing::HasSubstr("not writable"));
}

TEST_F(SsdTierTest, AFileSizeLimitIsAFullDisk) {
  rlimit before;
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &before), 0);
  ASSERT_TRUE(Open().ok());
  rlimit small = before;
  small.rlim_cur = 1 << 20;
  const auto handler = std::signal(SIGXFSZ, SIG_IGN);
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &small), 0);
  const std::vector<absl::Status> refused = PutPages(1, 0, 5);
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &before), 0);
  std::signal(SIGXFSZ, handler);
  EXPECT_THAT(refused, testing::Each(testing::Truly([](const absl::Status& status) {
                return absl::IsUnavailable(status);
              })));
  clock_.Advance(std::chrono::minutes(6));
  EXPECT_THAT(PutPages(1, 0, 5), testing::Each(IsOk()));
}

}  // namespace
}  // namespace crumb::storage
