// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "storage/tiered_store.h"

#include <sys/resource.h>

#include <atomic>
#include <future>
#include <mutex>
#include <random>
#include <set>
#include <thread>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "storage/store/open_tiered_store.h"
#include "tests/common/temporary_folder.h"
#include "tests/storage/fault_tier.h"
#include "tests/storage/memory_tier.h"
#include "tests/storage/store_calls.h"

namespace crumb::storage {
namespace {

class TieredStoreTest : public testing::Test {
 protected:
  void Open(const StoreOptions& options) {
    store_.reset();
    auto opened = TieredStore::Open(options, Clock::Real(), {});
    ASSERT_TRUE(opened.ok()) << opened.status();
    store_ = *std::move(opened);
  }
  void CommitPages(uint64_t sequence, uint64_t pages) {
    for (uint64_t i = 0; i < pages; ++i) {
      const auto outcome = Commit(*store_, SamplePage(sequence, i));
      ASSERT_TRUE(outcome.ok()) << outcome.status();
      ASSERT_EQ(*outcome, CommitOutcome::kStored);
    }
  }

  TemporaryFolder folder_;
  std::unique_ptr<TieredStore> store_;
};

TEST_F(TieredStoreTest, CommittedPagesAreHitsAtOnce) {
  Open(SmallStore(""));
  CommitPages(1, 5);
  const AcquireRequest request = RequestOf(1, 8);
  const auto result = Acquire(*store_, request);
  ASSERT_TRUE(result.ok());
  EXPECT_EQ(result->hit_pages, 5u);
  EXPECT_EQ(result->miss_reason, MissReason::kAbsent);
  EXPECT_THAT(result->page_tiers, testing::ElementsAreArray(std::vector<Tier>(5, Tier::kHost)));
  EXPECT_EQ(result->fragments.size(), 5u);
  EXPECT_TRUE(AllRight(*store_, request, *result));
  EXPECT_EQ(store_->Stats().leases, 1u);
  EXPECT_TRUE(store_->Release(result->lease));
  EXPECT_FALSE(store_->Release(result->lease));
  EXPECT_EQ(store_->Stats().leases, 0u);
  EXPECT_EQ(store_->Stats().leased_slots, 0u);
}

TEST_F(TieredStoreTest, ServesWithoutHostMemoryAndTakesItLater) {
  Open(SmallStore(folder_.path()));
  CommitPages(1, 4);
  ASSERT_TRUE(Flush(*store_).ok());
  store_.reset();
  const StoreOptions options = SmallStore(folder_.path());
  auto opened = TieredStore::Open(options, Clock::Real(), {}, {.host_bytes = 0});
  ASSERT_TRUE(opened.ok()) << opened.status();
  store_ = *std::move(opened);
  EXPECT_EQ(store_->Stats().host.capacity_bytes, 0u);
  EXPECT_TRUE(absl::IsResourceExhausted(Commit(*store_, SamplePage(2, 0)).status()));
  const AcquireRequest request = RequestOf(1, 4);
  const auto none = Acquire(*store_, request);
  ASSERT_TRUE(none.ok()) << none.status();
  EXPECT_EQ(none->hit_pages, 0u);
  EXPECT_EQ(none->miss_reason, MissReason::kBusy);

  const uint64_t total = options.host.bytes_max.value;
  const auto missing = store_->GrowHost(uint64_t{1} << 20);
  ASSERT_TRUE(missing.ok()) << missing.status();
  EXPECT_EQ(*missing, total - (uint64_t{1} << 20));
  EXPECT_EQ(store_->GrowHost(total).value(), 0u);
  EXPECT_EQ(store_->GrowHost(total).value(), 0u);
  EXPECT_EQ(store_->Stats().host.capacity_bytes, total);
  EXPECT_TRUE(Commit(*store_, SamplePage(2, 0)).ok());
  const auto all = Acquire(*store_, request);
  ASSERT_TRUE(all.ok()) << all.status();
  EXPECT_EQ(all->hit_pages, 4u);
  EXPECT_TRUE(AllRight(*store_, request, *all));
}

TEST_F(TieredStoreTest, DurablePagesSurviveARestart) {
  Open(SmallStore(folder_.path()));
  CommitPages(1, 20);
  const auto durable = Flush(*store_);
  ASSERT_TRUE(durable.ok()) << durable.status();
  EXPECT_EQ(*durable, 20u);
  Open(SmallStore(folder_.path()));
  EXPECT_EQ(store_->Stats().recovered_pages, 20u);
  const AcquireRequest request = RequestOf(1, 20);
  const auto result = Acquire(*store_, request);
  ASSERT_TRUE(result.ok());
  EXPECT_EQ(result->hit_pages, 20u);
  EXPECT_THAT(result->page_tiers, testing::Each(Tier::kSsd));
  EXPECT_TRUE(AllRight(*store_, request, *result));
}

TEST_F(TieredStoreTest, TheFirstCommitWins) {
  Open(SmallStore(""));
  CommitPages(1, 1);
  EXPECT_EQ(*Commit(*store_, SamplePage(1, 0)), CommitOutcome::kDeduplicated);
  EXPECT_EQ(store_->Stats().dedup_bytes, MetaOf(SamplePage(1, 0)).tiles_bytes);
  EXPECT_EQ(store_->Stats().host.pages, 1u);
}

TEST_F(TieredStoreTest, RanksOfAnyDegreeReadEachOthersPages) {
  Open(SmallStore(folder_.path()));
  SampleFragment part = SamplePage(1, 0);
  part.range = {{0, 1}, {0, 1}};
  ASSERT_TRUE(Commit(*store_, part).ok());
  AcquireRequest whole = RequestOf(1, 1);
  EXPECT_EQ(Acquire(*store_, whole)->miss_reason, MissReason::kNotCovered);
  AcquireRequest corner = whole;
  corner.range = part.range;
  const auto one = Acquire(*store_, corner);
  EXPECT_EQ(one->hit_pages, 1u);
  EXPECT_TRUE(AllRight(*store_, corner, *one));
  // Another degree commits all of the page: existing tiles stay, and the rest is added.
  EXPECT_EQ(*Commit(*store_, SamplePage(1, 0)), CommitOutcome::kStored);
  const auto all = Acquire(*store_, whole);
  ASSERT_EQ(all->hit_pages, 1u);
  EXPECT_EQ(all->fragments.size(), 3u);
  EXPECT_TRUE(AllRight(*store_, whole, *all));
  EXPECT_EQ(store_->Stats().host.pages, 1u);
  ASSERT_TRUE(Flush(*store_).ok());
  Open(SmallStore(folder_.path()));
  const auto back = Acquire(*store_, whole);
  ASSERT_EQ(back->hit_pages, 1u);
  EXPECT_EQ(back->fragments.size(), 3u);
  EXPECT_TRUE(AllRight(*store_, whole, *back));
}

TEST_F(TieredStoreTest, ALeaseIsReadByRangeUntilItEnds) {
  Open(SmallStore(""));
  SampleFragment part = SamplePage(1, 0);
  part.range = {{0, 1}, {0, 1}};
  ASSERT_TRUE(Commit(*store_, part).ok());
  CommitPages(1, 2);
  AcquireRequest request = RequestOf(1, 2);
  const auto leased = Acquire(*store_, request);
  ASSERT_EQ(leased->hit_pages, 2u);
  EXPECT_EQ(store_->Delete(request.keyspace, request.keys).value(), 2u);
  for (const bool corner : {false, true}) {
    if (corner) request.range = part.range;
    const auto read = store_->ReadLease(leased->lease, request.range);
    ASSERT_TRUE(read.has_value());
    EXPECT_EQ(read->pages, 2u);
    EXPECT_EQ(read->fragments.size(), corner ? 2u : leased->fragments.size());
    AcquireResult result = *leased;
    result.fragments = read->fragments;
    EXPECT_TRUE(AllRight(*store_, request, result));
  }
  EXPECT_TRUE(store_->Release(leased->lease));
  EXPECT_FALSE(store_->ReadLease(leased->lease, request.range).has_value());
}

TEST_F(TieredStoreTest, ALeaseProtectsItsBytesThroughEvictionAndDeletion) {
  StoreOptions options = SmallStore("");
  options.host.bytes_max = ByteSize{uint64_t{2} << 20};
  Open(options);
  CommitPages(1, 20);
  const AcquireRequest request = RequestOf(1, 20);
  const auto lease = Acquire(*store_, request);
  ASSERT_EQ(lease->hit_pages, 20u);
  ASSERT_TRUE(store_->Delete(request.keyspace, std::span(request.keys).first(10)).ok());
  for (uint64_t i = 0; i < 400; ++i) ASSERT_TRUE(Commit(*store_, SamplePage(100 + i, 0)).ok());
  EXPECT_TRUE(AllRight(*store_, request, *lease));
  EXPECT_EQ(Acquire(*store_, RequestOf(1, 1))->hit_pages, 0u) << "deleted";
  const uint64_t used = store_->Stats().host.resident_bytes;
  EXPECT_TRUE(store_->Release(lease->lease));
  EXPECT_LT(store_->Stats().host.resident_bytes, used);
}

TEST_F(TieredStoreTest, AStoreFullOfLeasesRefuses) {
  StoreOptions options = SmallStore("");
  options.host.bytes_max = ByteSize{uint64_t{1} << 20};
  Open(options);
  std::vector<LeaseId> leases;
  absl::StatusOr<CommitOutcome> outcome = CommitOutcome::kStored;
  for (uint64_t i = 0; i < 1000 && outcome.ok(); ++i) {
    outcome = Commit(*store_, SamplePage(i, 0));
    if (outcome.ok()) leases.push_back(Acquire(*store_, RequestOf(i, 1))->lease);
  }
  EXPECT_TRUE(absl::IsResourceExhausted(outcome.status())) << outcome.status();
  for (const LeaseId lease : leases) EXPECT_TRUE(store_->Release(lease));
  EXPECT_TRUE(Commit(*store_, SamplePage(5000, 0)).ok());
}

TEST_F(TieredStoreTest, DamagedCommitsBecomeNoPage) {
  Open(SmallStore(""));
  std::vector<std::byte> bytes = BytesOf(SamplePage(1, 0));
  bytes[100] ^= std::byte{1};
  EXPECT_TRUE(absl::IsDataLoss(store_->Commit(CommitOf(SamplePage(1, 0), bytes)).status()));
  EXPECT_EQ(store_->Stats().verify_failures_commit, 1u);
  EXPECT_EQ(store_->Stats().host.resident_bytes, 0u);
  EXPECT_EQ(Acquire(*store_, RequestOf(1, 1))->hit_pages, 0u);
}

TEST_F(TieredStoreTest, DroppedGenerationsAreMissesForGood) {
  Open(SmallStore(folder_.path()));
  CommitPages(1, 10);
  ASSERT_TRUE(Flush(*store_).ok());
  EXPECT_EQ(store_->DropKeyspace(SampleKeyspace(0), 2).value(), 10u);
  EXPECT_EQ(Acquire(*store_, RequestOf(1, 1))->hit_pages, 0u);
  EXPECT_TRUE(absl::IsInvalidArgument(Commit(*store_, SamplePage(1, 0)).status()));
  Open(SmallStore(folder_.path()));
  EXPECT_EQ(store_->Stats().recovered_pages, 0u);
  EXPECT_TRUE(absl::IsInvalidArgument(Commit(*store_, SamplePage(1, 0)).status()));
  SampleFragment newer = SamplePage(1, 0);
  newer.generation = 2;
  EXPECT_TRUE(Commit(*store_, newer).ok());
}

TEST_F(TieredStoreTest, AnOlderGenerationIsAMissForANewerReader) {
  Open(SmallStore(folder_.path()));
  CommitPages(1, 1);
  AcquireRequest request = RequestOf(1, 1);
  request.generation = 2;
  EXPECT_EQ(Acquire(*store_, request)->miss_reason, MissReason::kGeneration);
  EXPECT_EQ(Acquire(*store_, request)->hit_pages, 0u);
}

TEST_F(TieredStoreTest, DeletedPagesStayDeletedAfterARestart) {
  Open(SmallStore(folder_.path()));
  CommitPages(1, 30);
  const std::vector<PageKey> keys = RequestOf(1, 30).keys;
  // Some are written, some under way, some queued.
  EXPECT_EQ(store_->Delete(SampleKeyspace(0), std::span(keys).first(20)).value(), 20u);
  ASSERT_TRUE(Flush(*store_).ok());
  Open(SmallStore(folder_.path()));
  EXPECT_EQ(store_->Stats().recovered_pages, 10u);
  EXPECT_EQ(Acquire(*store_, RequestOf(1, 30))->hit_pages, 0u);
}

TEST_F(TieredStoreTest, LookupFindsWithoutLeasing) {
  Open(SmallStore(folder_.path()));
  CommitPages(1, 3);
  ASSERT_TRUE(Flush(*store_).ok());
  Open(SmallStore(folder_.path()));
  CommitPages(2, 1);
  const PageKey pending = SampleKey(1, 3);
  store_->SetPending(SampleKeyspace(0), "", std::span(&pending, 1));
  const LookupResult result = store_->Lookup(RequestOf(1, 5));
  EXPECT_EQ(result.hit_pages, 3u);
  EXPECT_THAT(result.page_tiers, testing::Each(Tier::kSsd));
  EXPECT_EQ(result.miss_reason, MissReason::kPending);
  EXPECT_EQ(store_->Lookup(RequestOf(2, 1)).page_tiers, std::vector<Tier>{Tier::kHost});
  EXPECT_EQ(store_->Lookup(RequestOf(3, 1)).miss_reason, MissReason::kAbsent);
  EXPECT_EQ(store_->Stats().leases, 0u);
  EXPECT_EQ(store_->Stats().promoted_pages, 0u);
}

TEST_F(TieredStoreTest, EventsReportAddedAndRemovedPages) {
  std::mutex mutex;
  std::set<std::pair<PageKey, Tier>> there;
  std::set<PageKey> durable;
  StoreEvents events;
  events.page = [&](const PageEvent& event) {
    std::lock_guard lock(mutex);
    if (event.kind == PageEvent::Kind::kAdded) {
      there.insert({event.key, event.tier});
    } else {
      there.erase({event.key, event.tier});
    }
  };
  events.durable = [&](const KeyspaceId&, const PageKey& key) {
    std::lock_guard lock(mutex);
    durable.insert(key);
  };
  auto opened = TieredStore::Open(SmallStore(folder_.path()), Clock::Real(), events);
  ASSERT_TRUE(opened.ok());
  store_ = *std::move(opened);
  CommitPages(1, 3);
  ASSERT_TRUE(Flush(*store_).ok());
  EXPECT_EQ(durable.size(), 3u);
  EXPECT_EQ(there.size(), 6u);
  EXPECT_EQ(store_->Stats().durable_pages, 3u);
  const PageKey key = SampleKey(1, 2);
  ASSERT_TRUE(store_->Delete(SampleKeyspace(0), std::span(&key, 1)).ok());
  EXPECT_EQ(there.size(), 4u);
  store_.reset();
}

TEST_F(TieredStoreTest, PagesThatLeaveHostMemoryComeBackFromSsd) {
  StoreOptions options = SmallStore(folder_.path());
  options.host.bytes_max = ByteSize{uint64_t{2} << 20};
  Open(options);
  for (uint64_t sequence = 0; sequence < 30; ++sequence) {
    CommitPages(sequence, 20);
    ASSERT_TRUE(Flush(*store_).ok());
  }
  for (uint64_t sequence = 0; sequence < 30; ++sequence) {
    const AcquireRequest request = RequestOf(sequence, 20);
    const auto result = Acquire(*store_, request);
    ASSERT_EQ(result->hit_pages, 20u) << sequence;
    ASSERT_TRUE(AllRight(*store_, request, *result));
    store_->Release(result->lease);
  }
  EXPECT_GT(store_->Stats().promoted_pages, 400u);
}

TEST_F(TieredStoreTest, SecondHitWritesOnlyWhatIsReadAgain) {
  StoreOptions options = SmallStore(folder_.path());
  options.ssd.admission = "second_hit";
  Open(options);
  CommitPages(1, 5);
  CommitPages(2, 5);
  const auto result = Acquire(*store_, RequestOf(1, 5));
  store_->Release(result->lease);
  ASSERT_TRUE(Flush(*store_).ok());
  EXPECT_EQ(store_->Stats().admission_rejected, 10u);
  Open(options);
  EXPECT_EQ(Acquire(*store_, RequestOf(1, 5))->hit_pages, 5u);
  EXPECT_EQ(Acquire(*store_, RequestOf(2, 5))->hit_pages, 0u);
}

TEST_F(TieredStoreTest, StopRefusesAndKeepsWhatWasQueued) {
  Open(SmallStore(folder_.path()));
  CommitPages(1, 50);
  EXPECT_TRUE(store_->Stop(std::chrono::seconds(30)).ok());
  EXPECT_TRUE(store_->Stop(std::chrono::seconds(30)).ok());
  EXPECT_TRUE(absl::IsUnavailable(Commit(*store_, SamplePage(1, 60)).status()));
  EXPECT_TRUE(absl::IsUnavailable(Acquire(*store_, RequestOf(1, 1)).status()));
  EXPECT_TRUE(absl::IsUnavailable(Flush(*store_).status()));
  Open(SmallStore(folder_.path()));
  EXPECT_EQ(store_->Stats().recovered_pages, 50u);
}

TEST_F(TieredStoreTest, AnIdleStoreUsesNoCpu) {
  Open(SmallStore(folder_.path()));
  CommitPages(1, 5);
  ASSERT_TRUE(Flush(*store_).ok());
  const auto cpu = [] {
    rusage usage;
    ::getrusage(RUSAGE_SELF, &usage);
    return usage.ru_utime.tv_sec * 1e6 + static_cast<double>(usage.ru_utime.tv_usec) +
           usage.ru_stime.tv_sec * 1e6 + static_cast<double>(usage.ru_stime.tv_usec);
  };
  const double before = cpu();
  std::this_thread::sleep_for(std::chrono::milliseconds(500));
  EXPECT_LT(cpu() - before, 5000) << "microseconds in half a second";
}

// Over a tier with faults.
class TieredStoreFaultTest : public testing::Test {
 protected:
  void SetUp() override {
    StoreOptions options = SmallStore("below");
    options.host.bytes_max = ByteSize{uint64_t{2} << 20};
    options.ssd.io_threads = 2;
    auto opened = OpenTieredStore(
        options, Clock::Real(), {},
        [&](FragmentTierEvents events) -> absl::StatusOr<std::unique_ptr<FragmentTier>> {
          auto below = std::make_unique<FaultTier>(
              std::make_unique<MemoryTier>(5000, Clock::Real(), std::move(events)));
          below_ = below.get();
          return below;
        });
    ASSERT_TRUE(opened.ok()) << opened.status();
    store_ = *std::move(opened);
  }
  void TearDown() override {
    if (below_ != nullptr) below_->Set(FaultTier::Fault::kNone);
  }
  // Pages of sequence 1 that are below only.
  void PutBelow(uint64_t pages) {
    for (uint64_t i = 0; i < pages; ++i) {
      const std::vector<std::byte> bytes = BytesOf(SamplePage(1, i));
      const FragmentWrite write = {MetaOf(SamplePage(1, i)), bytes};
      ASSERT_TRUE(below_->Put(std::span(&write, 1))[0].ok());
    }
  }

  FaultTier* below_ = nullptr;
  std::unique_ptr<TieredStore> store_;
};

TEST_F(TieredStoreFaultTest, DamagedReadsAreMissesWithTheReason) {
  for (const auto fault : {FaultTier::Fault::kGetFlips, FaultTier::Fault::kGetShort}) {
    PutBelow(4);
    below_->Set(fault);
    const auto result = Acquire(*store_, RequestOf(1, 4));
    ASSERT_TRUE(result.ok());
    EXPECT_EQ(result->hit_pages, 0u);
    EXPECT_EQ(result->miss_reason, MissReason::kCorrupt);
    below_->Set(FaultTier::Fault::kNone);
    EXPECT_EQ(Acquire(*store_, RequestOf(1, 4))->miss_reason, MissReason::kAbsent);
    const auto keys = RequestOf(1, 4).keys;
    ASSERT_TRUE(store_->Delete(SampleKeyspace(0), keys).ok());
  }
}

TEST_F(TieredStoreFaultTest, ACommitThatIsOvertakenStoresTheTilesThatAreMissing) {
  SampleFragment part = SamplePage(1, 0);
  part.range = {{0, 1}, {0, 2}};
  // Another commit brings half of the tiles while this one has seen that none are there.
  below_->OnNextFind([&] { EXPECT_EQ(Commit(*store_, part).value(), CommitOutcome::kStored); });
  EXPECT_EQ(Commit(*store_, SamplePage(1, 0)).value(), CommitOutcome::kStored);
  const AcquireRequest request = RequestOf(1, 1);
  const auto found = Acquire(*store_, request);
  ASSERT_TRUE(found.ok()) << found.status();
  EXPECT_EQ(found->hit_pages, 1u) << "acknowledged, and half of it is missing";
  EXPECT_TRUE(AllRight(*store_, request, *found));
}

TEST_F(TieredStoreFaultTest, FailedReadsAreMisses) {
  PutBelow(4);
  below_->Set(FaultTier::Fault::kGetFails);
  const auto result = Acquire(*store_, RequestOf(1, 4));
  EXPECT_EQ(result->hit_pages, 0u);
  EXPECT_EQ(result->miss_reason, MissReason::kBusy);
  below_->Set(FaultTier::Fault::kNone);
  EXPECT_EQ(Acquire(*store_, RequestOf(1, 4))->hit_pages, 4u);
}

TEST_F(TieredStoreFaultTest, ADeadlineEndsTheWaitWithWhatIsThere) {
  PutBelow(10);
  for (uint64_t i = 0; i < 3; ++i) {
    const auto keys = RequestOf(1, i + 1).keys;
    store_->Release(Acquire(*store_, RequestOf(1, i + 1))->lease);
  }
  below_->Set(FaultTier::Fault::kGetBlocks);
  AcquireRequest request = RequestOf(1, 10);
  request.deadline = Clock::Real().Now() + std::chrono::milliseconds(20);
  const auto result = Acquire(*store_, request);
  ASSERT_TRUE(result.ok());
  EXPECT_EQ(result->hit_pages, 3u);
  EXPECT_EQ(result->miss_reason, MissReason::kDeadline);
  EXPECT_TRUE(AllRight(*store_, request, *result));
  request.deadline = Clock::Real().Now();
  EXPECT_EQ(Acquire(*store_, request)->hit_pages, 3u) << "a deadline that has passed";
  below_->Set(FaultTier::Fault::kNone);
  request.deadline = TimePoint::max();
  const auto all = Acquire(*store_, request);
  EXPECT_EQ(all->hit_pages, 10u) << "reason " << static_cast<int>(all->miss_reason);
  EXPECT_TRUE(AllRight(*store_, request, *all));
}

TEST_F(TieredStoreFaultTest, WaitsEndWhenTheStoreIsToStop) {
  PutBelow(10);
  below_->Set(FaultTier::Fault::kGetBlocks);
  AcquireRequest request = RequestOf(1, 10);
  request.deadline = Clock::Real().Now() + std::chrono::hours(1);
  auto waiting = std::async(std::launch::async, [&] { return Acquire(*store_, request); });
  store_->EndWaits();
  const auto before = waiting.get();
  ASSERT_TRUE(before.ok()) << before.status();
  EXPECT_EQ(before->hit_pages, 0u);
  const auto after = Acquire(*store_, request);
  ASSERT_TRUE(after.ok()) << after.status();
  EXPECT_EQ(after->miss_reason, MissReason::kDeadline);
  below_->Set(FaultTier::Fault::kNone);
}

TEST_F(TieredStoreFaultTest, ReadersOfTheSamePageReadItOnce) {
  PutBelow(1);
  below_->Set(FaultTier::Fault::kGetBlocks);
  std::vector<std::future<uint32_t>> readers;
  for (int i = 0; i < 8; ++i) {
    auto hits = std::make_shared<std::promise<uint32_t>>();
    readers.push_back(hits->get_future());
    store_->Acquire(RequestOf(1, 1), [hits](auto result) { hits->set_value(result->hit_pages); });
  }
  below_->Set(FaultTier::Fault::kNone);
  for (auto& reader : readers) EXPECT_EQ(reader.get(), 1u);
  EXPECT_EQ(below_->gets(), 1);
}

TEST_F(TieredStoreFaultTest, ABrokenDiskStopsNoCaller) {
  below_->Set(FaultTier::Fault::kPutFails);
  for (uint64_t i = 0; i < 300; ++i) ASSERT_TRUE(Commit(*store_, SamplePage(i, 0)).ok());
  EXPECT_TRUE(absl::IsUnavailable(Flush(*store_).status()));
  EXPECT_GT(store_->Stats().write_queue_dropped, 0u);
  EXPECT_EQ(Acquire(*store_, RequestOf(299, 1))->hit_pages, 1u);
  // Pages that are still in host memory are written when the disk is back.
  below_->Set(FaultTier::Fault::kNone);
  const auto durable = Flush(*store_);
  ASSERT_TRUE(durable.ok()) << durable.status();
  EXPECT_EQ(*durable, store_->Stats().host.pages);
}

TEST_F(TieredStoreFaultTest, AStormServesOnlyRightBytesAndLeavesNothingBehind) {
  const unsigned seed = std::random_device()();
  SCOPED_TRACE(seed);
  constexpr int kThreads = 4;
  constexpr uint64_t kSequences = 12;
  constexpr uint64_t kPages = 24;
  std::atomic<int> wrong = 0;
  std::vector<std::thread> threads;
  for (int thread = 0; thread < kThreads; ++thread) {
    threads.emplace_back([&, thread] {
      std::mt19937 random(seed + static_cast<unsigned>(thread));
      for (int step = 0; step < 250; ++step) {
        const uint64_t sequence = random() % kSequences;
        const uint64_t pages = 1 + random() % kPages;
        const AcquireRequest request = RequestOf(sequence, pages);
        const auto held = Acquire(*store_, request);
        if (!held.ok()) ++wrong;
        for (uint64_t i = held->hit_pages; i < pages; ++i) {
          const auto outcome = Commit(*store_, SamplePage(sequence, i));
          if (!outcome.ok() && !absl::IsResourceExhausted(outcome.status())) ++wrong;
        }
        if (random() % 8 == 0 && !store_->Delete(request.keyspace, request.keys).ok()) ++wrong;
        if (random() % 16 == 0) {
          const TimePoint until = Clock::Real().Now() + std::chrono::milliseconds(1);
          if (!store_->Pin(request.keyspace, request.keys, until).ok()) ++wrong;
        }
        if (random() % 16 == 0) store_->Lookup(request);
        if (random() % 32 == 0) store_->Stats();
        if (!AllRight(*store_, request, *held)) ++wrong;
        if (held->lease != 0 && !store_->Release(held->lease)) ++wrong;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
  // Commits outran the writer, so pages were lost; all that are here are durable.
  const FlushReport flushed = FlushPages(*store_);
  EXPECT_EQ(flushed.no_room_pages + flushed.tier_off_pages, 0u) << flushed.ToStatus();
  for (uint64_t sequence = 0; sequence < kSequences; ++sequence) {
    ASSERT_TRUE(store_->Delete(SampleKeyspace(0), RequestOf(sequence, kPages).keys).ok());
  }
  // A reader may still refer to the pages of its last result.
  EXPECT_TRUE(store_->Stop(std::chrono::seconds(10)).ok());
  const StoreStats stats = store_->Stats();
  EXPECT_EQ(stats.leases, 0u);
  EXPECT_EQ(stats.leased_slots, 0u);
  EXPECT_EQ(stats.host.pages, 0u);
  EXPECT_EQ(stats.host.resident_bytes, 0u);
  EXPECT_EQ(stats.host.waste_bytes, 0u);
  EXPECT_EQ(stats.ssd.pages, 0u);
}

}  // namespace
}  // namespace crumb::storage
