// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
// The contract of every tier, run over all of them: the SSD tier with and without direct I/O, host
// memory and the whole store behind adapters, a fake in memory, and the fault wrapper at rest.

#include <algorithm>
#include <cstring>
#include <fstream>
#include <optional>
#include <set>
#include <thread>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "storage/fragment_tier.h"
#include "storage/ssd/ssd_tier.h"
#include "storage/store/open_tiered_store.h"
#include "tests/common/eventually.h"
#include "tests/common/fake_clock.h"
#include "tests/common/temporary_folder.h"
#include "tests/storage/fault_tier.h"
#include "tests/storage/memory_tier.h"
#include "tests/storage/store_calls.h"
#include "tests/storage/store_tiers.h"

namespace crumb::storage {
namespace {

// Every maker's tier holds so many of the samples' fragments at least, and fewer than half of the
// second number.
constexpr size_t kFragmentsMin = 400;
constexpr size_t kFragmentsFar = 2000;

struct Maker {
  const char* name;
  std::unique_ptr<FragmentTier> (*make)(const std::string& folder, const Clock& clock);
  TemporaryFolder::Place place = TemporaryFolder::Place::kMemory;
};

SsdOptions SmallSsd(const std::string& folder, bool direct_io) {
  SsdOptions options;
  options.path = folder;
  options.bytes_max = ByteSize{uint64_t{16} << 20};
  options.policy = "lru";
  options.direct_io = direct_io;
  return options;
}

std::unique_ptr<FragmentTier> MakeSsd(const std::string& folder, const Clock& clock) {
  return *SsdTier::Open(SmallSsd(folder, true), clock, {});
}
std::unique_ptr<FragmentTier> MakeBufferedSsd(const std::string& folder, const Clock& clock) {
  return *SsdTier::Open(SmallSsd(folder, false), clock, {});
}
std::unique_ptr<FragmentTier> MakeEncryptedSsd(const std::string& folder, const Clock& clock) {
  SsdOptions options = SmallSsd(folder, true);
  options.key_file = folder + "/key";
  std::ofstream(options.key_file) << std::string(64, 'e');
  options.path += "/encrypted";
  return *SsdTier::Open(options, clock, {});
}
std::unique_ptr<FragmentTier> MakeMemory(const std::string&, const Clock& clock) {
  return std::make_unique<MemoryTier>(kFragmentsMin * 3 / 2, clock, FragmentTierEvents{});
}
std::unique_ptr<FragmentTier> MakeFault(const std::string& folder, const Clock& clock) {
  return std::make_unique<FaultTier>(MakeMemory(folder, clock));
}
std::unique_ptr<FragmentTier> MakeHost(const std::string&, const Clock& clock) {
  return HostAsTier(uint64_t{12} << 20, clock);
}
std::unique_ptr<FragmentTier> MakeStore(const std::string& folder, const Clock&) {
  StoreOptions options = SmallStore(folder);
  options.host.bytes_max = ByteSize{uint64_t{4} << 20};
  options.ssd = SmallSsd(folder, true);
  return StoreAsTier(options);
}

class TierContract : public testing::TestWithParam<Maker> {
 protected:
  void SetUp() override {
    folder_.emplace(GetParam().place);
    tier_ = GetParam().make(folder_->path(), clock_);
  }

  absl::Status Put(const SampleFragment& sample) {
    const std::vector<std::byte> bytes = BytesOf(sample);
    const FragmentWrite write = {MetaOf(sample), bytes};
    return tier_->Put(std::span(&write, 1))[0];
  }
  // Pages of one page each, `first` and so on, in batches.
  void PutLonely(uint64_t first, uint64_t count) {
    constexpr uint64_t kBatch = 64;
    for (uint64_t begin = first; begin < first + count; begin += kBatch) {
      std::vector<std::vector<std::byte>> bytes;
      std::vector<FragmentWrite> writes;
      for (uint64_t i = begin; i < std::min(begin + kBatch, first + count); ++i) {
        bytes.push_back(BytesOf(Lonely(i)));
        writes.push_back({MetaOf(Lonely(i)), bytes.back()});
      }
      for (const absl::Status& status : tier_->Put(writes)) ASSERT_TRUE(status.ok()) << status;
    }
  }
  bool Has(const SampleFragment& sample) {
    return !tier_->Find(sample.keyspace, sample.key).empty();
  }
  // Whether the fragment is there with exactly the right bytes.
  bool HasRight(const SampleFragment& sample) {
    const FragmentMeta meta = MetaOf(sample);
    std::vector<std::byte> room((meta.bytes + 511) / 512 * 512);
    if (!tier_->Get(meta, room).ok()) return false;
    room.resize(meta.bytes);
    return room == BytesOf(sample);
  }
  static SampleFragment Lonely(uint64_t number) { return SamplePage(number, 0); }

  std::optional<TemporaryFolder> folder_;
  FakeClock clock_;
  std::unique_ptr<FragmentTier> tier_;
};

TEST_P(TierContract, GivesBackWhatWasPut) {
  for (uint64_t i = 0; i < 50; ++i) ASSERT_TRUE(Put(SamplePage(1, i)).ok());
  for (uint64_t i = 0; i < 50; ++i) {
    const SampleFragment sample = SamplePage(1, i);
    EXPECT_THAT(tier_->Find(sample.keyspace, sample.key),
                testing::ElementsAre(testing::Field(&FragmentMeta::range, sample.range)));
    EXPECT_TRUE(HasRight(sample));
  }
  EXPECT_FALSE(Has(SamplePage(2, 0)));
  std::vector<std::byte> room(1 << 16);
  EXPECT_TRUE(absl::IsNotFound(tier_->Get(MetaOf(SamplePage(2, 0)), room)));
  StoreStats stats;
  tier_->AddStats(stats);
  EXPECT_EQ(stats.ssd.pages, 50u);
}

TEST_P(TierContract, TakesABatchAndReturnsAStatusForEach) {
  std::vector<std::vector<std::byte>> bytes;
  std::vector<FragmentWrite> writes;
  for (uint64_t i = 0; i < 10; ++i) bytes.push_back(BytesOf(SamplePage(1, i % 8)));
  for (uint64_t i = 0; i < 10; ++i) writes.push_back({MetaOf(SamplePage(1, i % 8)), bytes[i]});
  const std::vector<absl::Status> statuses = tier_->Put(writes);
  ASSERT_EQ(statuses.size(), 10u);
  for (uint64_t i = 0; i < 8; ++i) {
    EXPECT_TRUE(statuses[i].ok()) << statuses[i];
    EXPECT_TRUE(HasRight(SamplePage(1, i)));
  }
  EXPECT_TRUE(absl::IsAlreadyExists(statuses[8])) << statuses[8];
  EXPECT_TRUE(absl::IsAlreadyExists(statuses[9])) << statuses[9];
}

TEST_P(TierContract, KeepsTheFirstOfTwo) {
  ASSERT_TRUE(Put(Lonely(1)).ok());
  EXPECT_TRUE(absl::IsAlreadyExists(Put(Lonely(1))));
  EXPECT_TRUE(HasRight(Lonely(1)));
}

TEST_P(TierContract, KeepsThePartsOfAPageApart) {
  SampleFragment left = Lonely(1);
  left.range.heads = {0, 1};
  SampleFragment right = Lonely(1);
  right.range.heads = {1, 2};
  ASSERT_TRUE(Put(right).ok());
  ASSERT_TRUE(Put(left).ok());
  EXPECT_EQ(tier_->Find(left.keyspace, left.key).size(), 2u);
  EXPECT_TRUE(HasRight(left));
  EXPECT_TRUE(HasRight(right));
  StoreStats stats;
  tier_->AddStats(stats);
  EXPECT_EQ(stats.ssd.pages, 1u);
}

TEST_P(TierContract, RemovesTheNamedPages) {
  for (uint64_t i = 0; i < 3; ++i) ASSERT_TRUE(Put(Lonely(i)).ok());
  const std::vector<PageKey> keys = {Lonely(0).key, Lonely(2).key, Lonely(9).key};
  EXPECT_EQ(tier_->Remove(SampleKeyspace(0), keys).value(), 2u);
  EXPECT_FALSE(Has(Lonely(0)));
  EXPECT_TRUE(HasRight(Lonely(1)));
  EXPECT_FALSE(Has(Lonely(2)));
  ASSERT_TRUE(Put(Lonely(0)).ok());
  EXPECT_TRUE(HasRight(Lonely(0)));
}

TEST_P(TierContract, DroppedGenerationsStayDropped) {
  SampleFragment other = Lonely(1);
  other.keyspace = SampleKeyspace(5);
  ASSERT_TRUE(Put(Lonely(0)).ok());
  ASSERT_TRUE(Put(other).ok());
  EXPECT_GT(tier_->KeyspaceBytes(SampleKeyspace(0)), 0u);
  EXPECT_EQ(tier_->Drop(SampleKeyspace(0), 2).value(), 1u);
  // A page that is being written to the tier below counts until that ends.
  EXPECT_TRUE(Eventually([&] { return tier_->KeyspaceBytes(SampleKeyspace(0)) == 0; }));
  EXPECT_GT(tier_->KeyspaceBytes(SampleKeyspace(5)), 0u);
  EXPECT_EQ(tier_->KeyspaceBytes(SampleKeyspace(6)), 0u);
  EXPECT_EQ(tier_->GenerationOf(SampleKeyspace(0)), 2u);
  EXPECT_EQ(tier_->GenerationOf(SampleKeyspace(5)), 0u);
  EXPECT_FALSE(Has(Lonely(0)));
  EXPECT_TRUE(HasRight(other));
  EXPECT_FALSE(Put(Lonely(0)).ok());
  SampleFragment newer = Lonely(0);
  newer.generation = 2;
  EXPECT_TRUE(Put(newer).ok());
  EXPECT_TRUE(HasRight(newer));
}

TEST_P(TierContract, ANewGenerationReplacesThePage) {
  SampleFragment old_half = Lonely(0);
  old_half.range.heads = {1, 2};
  ASSERT_TRUE(Put(old_half).ok());
  SampleFragment newer = Lonely(0);
  newer.generation = 2;
  ASSERT_TRUE(Put(newer).ok());
  EXPECT_TRUE(HasRight(newer));
  EXPECT_EQ(tier_->Find(newer.keyspace, newer.key).size(), 1u);
  EXPECT_FALSE(Put(old_half).ok());
}

TEST_P(TierContract, HoldsWhatItHasRoomForAndEvictsTheRest) {
  PutLonely(0, kFragmentsFar);
  std::set<uint64_t> there;
  for (uint64_t i = 0; i < kFragmentsFar; ++i) {
    if (!Has(Lonely(i))) continue;
    there.insert(i);
    if (i % 16 == 0) {
      EXPECT_TRUE(HasRight(Lonely(i)));
    }
  }
  EXPECT_GE(there.size(), kFragmentsMin);
  EXPECT_LT(there.size(), kFragmentsFar / 2);
  EXPECT_TRUE(there.contains(kFragmentsFar - 1)) << "the newest";
  EXPECT_FALSE(there.contains(0)) << "the oldest";
}

TEST_P(TierContract, ATouchedPageOutlivesOthers) {
  PutLonely(0, kFragmentsMin / 4);
  const PageKey key = Lonely(0).key;
  for (uint64_t i = 0; i < kFragmentsFar / 2; i += 64) {
    tier_->Touch(SampleKeyspace(0), std::span(&key, 1));
    PutLonely(1000000 + i, 64);
  }
  EXPECT_TRUE(HasRight(Lonely(0)));
  EXPECT_FALSE(Has(Lonely(1)));
}

TEST_P(TierContract, APinnedPageStaysUntilItsTime) {
  ASSERT_TRUE(Put(Lonely(0)).ok());
  const std::vector<PageKey> keys = {Lonely(0).key, Lonely(77).key};
  EXPECT_EQ(tier_->Pin(SampleKeyspace(0), keys, TimePoint::max()), 1u);
  PutLonely(1000, kFragmentsFar / 2);
  EXPECT_TRUE(HasRight(Lonely(0)));
  tier_->Pin(SampleKeyspace(0), keys, TimePoint::min());
  PutLonely(90000, kFragmentsFar / 2);
  EXPECT_FALSE(Has(Lonely(0)));
}

TEST_P(TierContract, ListsItsPages) {
  for (uint64_t i = 0; i < 5; ++i) ASSERT_TRUE(Put(Lonely(i)).ok());
  std::set<PageKey> keys;
  tier_->ForEachPage(SampleKeyspace(0), [&](const PageKey& key) { keys.insert(key); });
  EXPECT_EQ(keys.size(), 5u);
  EXPECT_TRUE(keys.contains(Lonely(3).key));
  tier_->ForEachPage(SampleKeyspace(3), [&](const PageKey&) { ADD_FAILURE(); });
}

TEST_P(TierContract, KeepsRecords) {
  ASSERT_TRUE(tier_->PutRecord("node", "a").ok());
  ASSERT_TRUE(tier_->PutRecord("state", std::string("\0b", 2)).ok());
  ASSERT_TRUE(tier_->PutRecord("node", "c").ok());
  const auto records = tier_->Records();
  ASSERT_TRUE(records.ok());
  EXPECT_THAT(*records,
              testing::UnorderedElementsAre(testing::Pair("node", "c"),
                                            testing::Pair("state", std::string("\0b", 2))));
  ASSERT_TRUE(tier_->PutRecord("node", "").ok());
  EXPECT_THAT(*tier_->Records(),
              testing::ElementsAre(testing::Pair("state", std::string("\0b", 2))));
}

TEST_P(TierContract, ManyThreadsSeeOnlyRightBytes) {
  constexpr int kThreads = 3;
  constexpr uint64_t kPages = 120;
  std::atomic<int> wrong = 0;
  std::vector<std::thread> threads;
  for (int thread = 0; thread < kThreads; ++thread) {
    threads.emplace_back([&, thread] {
      for (uint64_t step = 0; step < kPages * 2; ++step) {
        const SampleFragment sample = Lonely((step * 7 + static_cast<uint64_t>(thread)) % kPages);
        const absl::Status put = Put(sample);
        if (!put.ok() && !absl::IsAlreadyExists(put)) {
          ADD_FAILURE() << put;
          ++wrong;
        }
        if (step % 5 == 0) {
          EXPECT_TRUE(tier_->Remove(sample.keyspace, std::span(&sample.key, 1)).ok());
        }
        const FragmentMeta meta = MetaOf(sample);
        std::vector<std::byte> room((meta.bytes + 511) / 512 * 512);
        const absl::Status got = tier_->Get(meta, room);
        if (got.ok() && !IsRight(room, sample.keyspace, sample.key, meta.tiles_bytes)) ++wrong;
        if (absl::IsDataLoss(got)) {
          ADD_FAILURE() << got;
          ++wrong;
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
}

INSTANTIATE_TEST_SUITE_P(Tiers, TierContract,
                         testing::Values(Maker{"Ssd", MakeSsd, TemporaryFolder::Place::kDisk},
                                         Maker{"BufferedSsd", MakeBufferedSsd},
                                         Maker{"EncryptedSsd", MakeEncryptedSsd},
                                         Maker{"Memory", MakeMemory}, Maker{"Fault", MakeFault},
                                         Maker{"Host", MakeHost}, Maker{"Store", MakeStore}),
                         [](const auto& maker) { return std::string(maker.param.name); });

}  // namespace
}  // namespace crumb::storage
