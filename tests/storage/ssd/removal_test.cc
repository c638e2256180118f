// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
// A page whose removal was acknowledged does not come back, whatever the disk did meanwhile. A
// crash is a copy of the folder as it is at that moment.

#include <sys/resource.h>

#include <csignal>
#include <filesystem>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "storage/ssd/ssd_tier.h"
#include "tests/common/fake_clock.h"
#include "tests/common/temporary_folder.h"
#include "tests/storage/store_calls.h"

namespace crumb::storage {
namespace {

// While it lives no file of this process can grow: index writes fail as on a full disk.
class FullDisk {
 public:
  FullDisk() : handler_(std::signal(SIGXFSZ, SIG_IGN)) {
    ::getrlimit(RLIMIT_FSIZE, &before_);
    rlimit none = before_;
    none.rlim_cur = 0;
    ::setrlimit(RLIMIT_FSIZE, &none);
  }
  ~FullDisk() {
    ::setrlimit(RLIMIT_FSIZE, &before_);
    std::signal(SIGXFSZ, handler_);
  }

 private:
  void (*const handler_)(int);
  rlimit before_;
};

class RemovalTest : public testing::Test {
 protected:
  RemovalTest() {
    options_.path = folder_.path() + "/ssd";
    options_.bytes_max = ByteSize{uint64_t{32} << 20};
    options_.policy = "lru";
    tier_ = SsdTier::Open(options_, clock_, {}).value();
    Put(0, 20);
  }

  void Put(uint64_t first, uint64_t count, uint64_t generation = 1) {
    for (uint64_t i = first; i < first + count; ++i) {
      SampleFragment sample = SamplePage(i, 0);
      sample.generation = generation;
      const std::vector<std::byte> bytes = BytesOf(sample);
      const FragmentWrite write = {MetaOf(sample), bytes};
      ASSERT_TRUE(tier_->Put(std::span(&write, 1))[0].ok());
    }
  }
  // Opens the tier as a process finds it that starts after a crash now.
  std::unique_ptr<FragmentTier> AfterCrash() {
    SsdOptions options = options_;
    options.path = folder_.path() + "/crashed" + std::to_string(++crashes_);
    std::filesystem::copy(options_.path, options.path, std::filesystem::copy_options::recursive);
    return SsdTier::Open(options, clock_, {}).value();
  }
  bool Has(const FragmentTier& tier, uint64_t number) const {
    return !tier.Find(SampleKeyspace(0), SampleKey(number, 0)).empty();
  }

  TemporaryFolder folder_;
  SsdOptions options_;
  FakeClock clock_;
  std::unique_ptr<FragmentTier> tier_;
  int crashes_ = 0;
};

TEST_F(RemovalTest, ADeleteThatIsNotDurableIsAnErrorUntilItIs) {
  const std::vector<PageKey> keys = {SampleKey(3, 0), SampleKey(4, 0)};
  {
    FullDisk full;
    EXPECT_TRUE(absl::IsUnavailable(tier_->Remove(SampleKeyspace(0), keys).status()));
    EXPECT_FALSE(Has(*tier_, 3)) << "out of sight at once";
    EXPECT_TRUE(absl::IsUnavailable(tier_->Remove(SampleKeyspace(0), keys).status()))
        << "a repetition, with the page out of sight";
  }
  EXPECT_TRUE(Has(*AfterCrash(), 3)) << "the error was no lie";
  EXPECT_TRUE(tier_->Remove(SampleKeyspace(0), keys).ok());
  const auto after = AfterCrash();
  EXPECT_FALSE(Has(*after, 3));
  EXPECT_FALSE(Has(*after, 4));
  EXPECT_TRUE(Has(*after, 5));
}

TEST_F(RemovalTest, ADropThatIsNotDurableIsAnErrorUntilItIs) {
  {
    FullDisk full;
    EXPECT_TRUE(absl::IsUnavailable(tier_->Drop(SampleKeyspace(0), 2).status()));
    EXPECT_FALSE(Has(*tier_, 3));
    EXPECT_EQ(tier_->GenerationOf(SampleKeyspace(0)), 2u);
  }
  EXPECT_TRUE(tier_->Drop(SampleKeyspace(0), 2).ok());
  const auto after = AfterCrash();
  EXPECT_FALSE(Has(*after, 3));
  EXPECT_EQ(after->GenerationOf(SampleKeyspace(0)), 2u);
}

// The drop is not repeated, but other writes follow it.
TEST_F(RemovalTest, AFailedDropGoesAlongWithTheNextWrite) {
  {
    FullDisk full;
    EXPECT_FALSE(tier_->Drop(SampleKeyspace(0), 2).ok());
  }
  ASSERT_TRUE(tier_->PutRecord("node", "me").ok());
  const auto after = AfterCrash();
  EXPECT_EQ(after->GenerationOf(SampleKeyspace(0)), 2u);
  for (uint64_t i = 0; i < 20; ++i) EXPECT_FALSE(Has(*after, i)) << i;
}

TEST_F(RemovalTest, ARecordThatIsNotDurableIsAnError) {
  FullDisk full;
  EXPECT_FALSE(tier_->PutRecord("node", "me").ok());
  EXPECT_TRUE(tier_->Records()->empty());
}

// More pages than one index write takes.
TEST_F(RemovalTest, ALargeDropOnAFullDiskIsWrittenOnceThereIsRoom) {
  constexpr uint64_t kPages = 5'000;
  options_.path = folder_.path() + "/large";
  options_.bytes_max = ByteSize{uint64_t{256} << 20};
  tier_ = SsdTier::Open(options_, clock_, {}).value();
  std::vector<std::vector<std::byte>> bytes;
  std::vector<FragmentWrite> writes;
  for (uint64_t i = 0; i < kPages; ++i) bytes.push_back(BytesOf(SamplePage(100 + i, 0)));
  for (uint64_t i = 0; i < kPages; ++i) {
    writes.push_back({MetaOf(SamplePage(100 + i, 0)), bytes[i]});
  }
  for (const absl::Status& put : tier_->Put(writes)) ASSERT_TRUE(put.ok()) << put;
  {
    FullDisk full;
    EXPECT_TRUE(absl::IsUnavailable(tier_->Drop(SampleKeyspace(0), 2).status()));
    EXPECT_FALSE(Has(*tier_, 100));
  }
  EXPECT_TRUE(tier_->Drop(SampleKeyspace(0), 2).ok());
  const auto after = AfterCrash();
  EXPECT_EQ(after->GenerationOf(SampleKeyspace(0)), 2u);
  EXPECT_EQ(after->KeyspaceBytes(SampleKeyspace(0)), 0u);
}

}  // namespace
}  // namespace crumb::storage
