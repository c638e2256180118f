// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
// The report of Flush on committed pages agrees with the pages that a restart finds.

#include <algorithm>
#include <atomic>
#include <chrono>
#include <functional>
#include <future>
#include <set>
#include <utility>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "storage/host/host_room.h"
#include "storage/host/host_tier.h"
#include "storage/store/open_tiered_store.h"
#include "storage/store/write_through.h"
#include "tests/common/eventually.h"
#include "tests/common/temporary_folder.h"
#include "tests/storage/fault_tier.h"
#include "tests/storage/memory_tier.h"
#include "tests/storage/store_calls.h"

namespace crumb::storage {
namespace {

FragmentTierEvents EventsOfNone() {
  const auto ignore = [](const KeyspaceId&, const PageKey&) {};
  return {.added = ignore, .removed = ignore};
}

using testing::HasSubstr;

// A store over a tier below in memory, which outlives it as a disk does.
class FlushTest : public testing::Test {
 protected:
  FlushTest() {
    options_.host.bytes_max = ByteSize{uint64_t{2} << 20};
    options_.ssd.write_queue_pages_max = 8;
  }
  ~FlushTest() override {
    if (below_ == nullptr) return;
    below_->Set(FaultTier::Fault::kNone);
    below_->BlockTouches(false);
  }

  void Open(size_t fragments_max = 5000) {
    auto opened = OpenTieredStore(
        options_, Clock::Real(), Events(),
        [&](FragmentTierEvents events) -> absl::StatusOr<std::unique_ptr<FragmentTier>> {
          auto below = std::make_unique<FaultTier>(
              std::make_unique<MemoryTier>(fragments_max, Clock::Real(), std::move(events)));
          below_ = below.get();
          return below;
        });
    ASSERT_TRUE(opened.ok()) << opened.status();
    store_ = *std::move(opened);
  }
  StoreEvents Events() {
    StoreEvents events;
    events.page = [this](const PageEvent& event) {
      if (event.kind != PageEvent::Kind::kAdded) return;
      if (const auto hook = std::exchange(on_added_, nullptr)) hook();
    };
    return events;
  }
  // Commits the first page of sequences from `first` on; returns how many were stored.
  uint64_t CommitPages(uint64_t first, uint64_t count) {
    uint64_t stored = 0;
    for (uint64_t i = first; i < first + count; ++i) {
      const auto outcome = Commit(*store_, SamplePage(i, 0));
      stored += outcome.ok() && *outcome == CommitOutcome::kStored ? 1 : 0;
    }
    return stored;
  }
  uint64_t PagesBelow() const {
    uint64_t pages = 0;
    below_->ForEachPage(SampleKeyspace(0), [&](const PageKey&) { ++pages; });
    return pages;
  }

  // Pushes all pages out of host memory while nothing can be written, and expects the loss of those
  // and of `others`.
  void ExpectLost(uint64_t others) {
    ASSERT_EQ(FlushPages(*store_).lost_pages, 0u);
    const uint64_t stored = CommitPages(100, 700);
    ASSERT_EQ(store_->DurabilityOf(SampleKeyspace(0), SampleKey(0, 0), 1, SamplePage(0, 0).range),
              Durability::kNone);
    const FlushReport report = FlushPages(*store_);
    EXPECT_EQ(report.lost_pages + report.tier_off_pages, stored + others);
  }

  // Starts a Flush on the calling thread, which is between two steps of a Commit, and waits for as
  // long as a Flush takes that does not wait for the Commit.
  void FlushBetween() {
    store_->Flush(std::nullopt, std::nullopt,
                  [this](const FlushReport& report) { flushed_.set_value(report); });
    flushed_future_.wait_for(std::chrono::milliseconds(300));
  }

  StoreOptions options_ = SmallStore("below");
  FaultTier* below_ = nullptr;
  std::function<void()> on_added_;  // called for the next page that comes to host memory
  std::promise<FlushReport> flushed_;
  std::future<FlushReport> flushed_future_ = flushed_.get_future();
  std::unique_ptr<TieredStore> store_;
};

TEST_F(FlushTest, WritesWhatTheQueueHadNoRoomFor) {
  Open();
  below_->Set(FaultTier::Fault::kPutFails);
  EXPECT_EQ(CommitPages(0, 100), 100u);
  below_->Set(FaultTier::Fault::kNone);
  const FlushReport report = FlushPages(*store_);
  EXPECT_TRUE(report.ToStatus().ok()) << report.ToStatus();
  EXPECT_EQ(report.durable_pages, 100u);
  EXPECT_EQ(PagesBelow(), 100u);
}

// A page is visible a moment before it is in the write queue.
TEST_F(FlushTest, APageBetweenItsPublishingAndTheQueueIsWaitedFor) {
  Open();
  CommitPages(0, 3);
  on_added_ = [this] { FlushBetween(); };
  EXPECT_EQ(CommitPages(3, 1), 1u);
  const FlushReport report = flushed_future_.get();
  EXPECT_TRUE(report.ToStatus().ok()) << report.ToStatus();
  EXPECT_EQ(report.durable_pages, 4u);
}

TEST_F(FlushTest, PagesThatLeftMemoryUnwrittenAreNamed) {
  Open();
  below_->Set(FaultTier::Fault::kPutFails);
  const uint64_t stored = CommitPages(0, 700);
  ASSERT_EQ(stored, 700u);
  below_->Set(FaultTier::Fault::kNone);
  const FlushReport report = FlushPages(*store_);
  EXPECT_GT(report.lost_pages, 0u);
  EXPECT_EQ(report.durable_pages, PagesBelow());
  EXPECT_EQ(report.durable_pages + report.lost_pages, stored);
  const absl::Status status = report.ToStatus();
  EXPECT_TRUE(absl::IsDataLoss(status)) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr(std::to_string(report.lost_pages)));
  EXPECT_EQ(store_->Stats().lost_pages, report.lost_pages);
  EXPECT_TRUE(Flush(*store_).ok()) << "the loss was reported";
}

TEST_F(FlushTest, EveryCallerLearnsOfTheLossOfItsOwnPages) {
  Open();
  const uint64_t first = store_->FlushMark(std::nullopt);
  below_->Set(FaultTier::Fault::kPutFails);
  CommitPages(0, 700);
  below_->Set(FaultTier::Fault::kNone);
  const FlushReport found = FlushPages(*store_, first);
  EXPECT_GT(found.lost_pages, 0u);
  EXPECT_EQ(FlushPages(*store_, first).lost_pages, found.lost_pages) << "another caller";
  EXPECT_EQ(FlushPages(*store_, found.mark).lost_pages, 0u) << "a commit behind the loss";
  EXPECT_EQ(FlushPages(*store_, UINT64_MAX).lost_pages, 0u) << "nothing committed";
  EXPECT_EQ(FlushPages(*store_).lost_pages, found.lost_pages) << "the first without a mark";
  EXPECT_EQ(FlushPages(*store_).lost_pages, 0u);
}

TEST_F(FlushTest, AMarkOfAnEarlierProcessIsALossUnlessItsPagesWereHandedOver) {
  Open();
  const uint64_t mark = store_->FlushMark(std::nullopt);
  CommitPages(0, 5);
  store_.reset();
  Open();
  EXPECT_TRUE(absl::IsDataLoss(FlushPages(*store_, mark).ToStatus()));
  EXPECT_TRUE(FlushPages(*store_, store_->FlushMark(std::nullopt)).ToStatus().ok());
  const uint64_t hour_ns = 3'600'000'000'000;
  EXPECT_TRUE(absl::IsDataLoss(FlushPages(*store_, mark + hour_ns).ToStatus()))
      << "the clock was set back by an hour between the two";
}

TEST_F(FlushTest, ATenantLearnsOfItsOwnPagesOnly) {
  Open();
  store_->SetOwner(SampleKeyspace(0), "a");
  store_->SetOwner(SampleKeyspace(1), "b");
  SampleFragment of_b = SamplePage(0, 0);
  of_b.keyspace = SampleKeyspace(1);
  ASSERT_TRUE(Commit(*store_, of_b).ok());
  ASSERT_TRUE(FlushPages(*store_, std::nullopt, "b").ToStatus().ok());
  const uint64_t mark_of_a = store_->FlushMark("a");
  const uint64_t mark_of_b = store_->FlushMark("b");
  below_->Set(FaultTier::Fault::kPutFails);
  CommitPages(0, 700);
  for (const std::optional<uint64_t> since :
       {std::optional<uint64_t>(), std::optional(mark_of_b)}) {
    const FlushReport other = FlushPages(*store_, since, "b");
    EXPECT_TRUE(other.ToStatus().ok()) << other.ToStatus();
    EXPECT_EQ(other.durable_pages, 1u);
    EXPECT_EQ(other.mark, mark_of_b) << "it says how much another tenant lost";
  }
  below_->Set(FaultTier::Fault::kNone);
  const FlushReport own = FlushPages(*store_, std::nullopt, "a");
  EXPECT_GT(own.lost_pages, 0u) << "the other tenant took the report";
  EXPECT_EQ(own.lost_pages + own.durable_pages, 700u);
  EXPECT_EQ(FlushPages(*store_, mark_of_a, "a").lost_pages, own.lost_pages);
  EXPECT_EQ(FlushPages(*store_, std::nullopt, "a").lost_pages, 0u);
  const FlushReport all = FlushPages(*store_);
  EXPECT_EQ(all.lost_pages, own.lost_pages) << "an administrator sees every tenant's losses";
  EXPECT_EQ(all.durable_pages, own.durable_pages + 1);
}

TEST_F(FlushTest, ATierWithoutRoomIsAnError) {
  Open(/*fragments_max=*/10);
  EXPECT_EQ(CommitPages(0, 100), 100u);
  const FlushReport report = FlushPages(*store_);
  EXPECT_EQ(report.durable_pages, 10u);
  EXPECT_EQ(report.no_room_pages, 90u);
  EXPECT_TRUE(absl::IsResourceExhausted(report.ToStatus())) << report.ToStatus();
  EXPECT_THAT(std::string(report.ToStatus().message()), HasSubstr("90 "));
}

TEST_F(FlushTest, ATierThatTakesNothingIsAnError) {
  Open(/*fragments_max=*/0);
  EXPECT_EQ(CommitPages(0, 60), 60u);
  const FlushReport full = FlushPages(*store_);
  EXPECT_EQ(full.durable_pages, 0u);
  EXPECT_EQ(full.no_room_pages, 60u);
  EXPECT_THAT(full.why, HasSubstr("all pinned"));
  below_->Set(FaultTier::Fault::kPutFails);
  const FlushReport off = FlushPages(*store_);
  EXPECT_EQ(off.tier_off_pages, 60u);
  EXPECT_TRUE(absl::IsUnavailable(off.ToStatus())) << off.ToStatus();
}

TEST_F(FlushTest, WithoutATierNothingIsDurable) {
  auto opened = TieredStore::Open(SmallStore(""), Clock::Real(), {});
  ASSERT_TRUE(opened.ok()) << opened.status();
  store_ = *std::move(opened);
  EXPECT_TRUE(Flush(*store_).ok());
  CommitPages(0, 3);
  const FlushReport report = FlushPages(*store_);
  EXPECT_EQ(report.tier_off_pages, 3u);
  EXPECT_THAT(std::string(report.ToStatus().message()), HasSubstr("no SSD tier is configured"));
  EXPECT_EQ(store_->DurabilityOf(SampleKeyspace(0), SampleKey(0, 0), 1, {{0, 1}, {0, 1}}),
            Durability::kNone);
}

TEST_F(FlushTest, SecondHitOwesThePagesThatWereRead) {
  options_.ssd.admission = "second_hit";
  Open();
  EXPECT_EQ(CommitPages(0, 20), 20u);
  for (uint64_t i = 0; i < 5; ++i) {
    const auto read = Acquire(*store_, RequestOf(i, 1));
    ASSERT_EQ(read->hit_pages, 1u);
    store_->Release(read->lease);
  }
  const FlushReport report = FlushPages(*store_);
  EXPECT_TRUE(report.ToStatus().ok()) << report.ToStatus();
  EXPECT_EQ(report.durable_pages, 5u);
  EXPECT_EQ(report.unread_pages, 15u);
  CommitPages(100, 700);
  EXPECT_EQ(FlushPages(*store_).lost_pages, 0u) << "none of them was admitted";
}

// The store notes the recency of pages behind the responses, of so many responses at a time.
class FullRecencyTest : public FlushTest {
 protected:
  FullRecencyTest() { options_.ssd.admission = "second_hit"; }
  void Fill() {
    Open();
    EXPECT_EQ(CommitPages(0, kRead + 20), kRead + 20);
    below_->BlockTouches(true);
    for (int i = 0; i < 300; ++i) Read(0);
  }
  void Read(uint64_t sequence) {
    const auto read = Acquire(*store_, RequestOf(sequence, 1));
    ASSERT_EQ(read->hit_pages, 1u);
    store_->Release(read->lease);
  }
  static constexpr uint64_t kRead = 20;
};

TEST_F(FullRecencyTest, PagesThatAreReadAreWritten) {
  options_.ssd.write_queue_pages_max = 64;
  Fill();
  for (uint64_t i = 0; i < kRead; ++i) Read(i);
  EXPECT_TRUE(Eventually([&] { return PagesBelow() == kRead; })) << PagesBelow();
  EXPECT_EQ(FlushPages(*store_).unread_pages, 20u);
}

TEST_F(FullRecencyTest, PagesThatAreReadAndThenLostAreReported) {
  Fill();
  below_->Set(FaultTier::Fault::kPutBlocks);
  for (uint64_t i = 0; i < kRead; ++i) Read(i);
  CommitPages(100, 700);
  below_->Set(FaultTier::Fault::kNone);
  const FlushReport report = FlushPages(*store_);
  EXPECT_GT(report.lost_pages, 0u);
  EXPECT_EQ(report.lost_pages + report.durable_pages, kRead);
}

TEST_F(FlushTest, DeletedPagesAreNotMissed) {
  Open();
  below_->Set(FaultTier::Fault::kPutFails);
  CommitPages(0, 40);
  std::vector<PageKey> keys;
  for (uint64_t i = 0; i < 30; ++i) keys.push_back(SampleKey(i, 0));
  ASSERT_TRUE(store_->Delete(SampleKeyspace(0), keys).ok());
  below_->Set(FaultTier::Fault::kNone);
  const FlushReport report = FlushPages(*store_);
  EXPECT_TRUE(report.ToStatus().ok()) << report.ToStatus();
  EXPECT_EQ(report.durable_pages, 10u);
}

TEST_F(FlushTest, PagesThatTheTierEvictedSinceAreNotMissed) {
  Open(/*fragments_max=*/200);
  CommitPages(0, 100);
  ASSERT_TRUE(Flush(*store_).ok());
  // Pages leave both tiers for room, after they were durable.
  for (uint64_t round = 1; round < 12; ++round) {
    CommitPages(round * 100, 100);
    EXPECT_EQ(FlushPages(*store_).lost_pages, 0u) << round;
  }
}

// A page that the tier below evicted after it was durable is not owed to its writer any more, until
// it is committed once more: host memory still has it, so that commit stores nothing.
TEST_F(FlushTest, ACommitOfAPageThatTheTierEvictedIsOwedAgain) {
  Open(/*fragments_max=*/1);
  CommitPages(0, 1);
  ASSERT_TRUE(Flush(*store_).ok());
  CommitPages(1, 1);
  FlushPages(*store_);
  ASSERT_TRUE(below_->Find(SampleKeyspace(0), SampleKey(0, 0)).empty());
  below_->Set(FaultTier::Fault::kPutFails);
  ASSERT_EQ(*Commit(*store_, SamplePage(0, 0)), CommitOutcome::kDeduplicated);
  ExpectLost(1);
}

// Tests the time between the page's eviction and the moment at which host memory is notified of its
// write.
TEST_F(FlushTest, ACommitWhileThePageIsWrittenIsOwedAgain) {
  Open(/*fragments_max=*/1);
  std::optional<CommitOutcome> outcome;
  below_->AfterNextPut([&] {
    const SampleFragment other = SamplePage(1, 0);
    const std::vector<std::byte> bytes = BytesOf(other);
    const FragmentWrite write = {MetaOf(other), bytes};
    EXPECT_TRUE(below_->inner().Put(std::span(&write, 1))[0].ok());
    outcome = *Commit(*store_, SamplePage(0, 0));
    below_->Set(FaultTier::Fault::kPutFails);
  });
  CommitPages(0, 1);
  FlushPages(*store_);
  ASSERT_EQ(outcome, CommitOutcome::kDeduplicated);
  ExpectLost(1);
}

// Other tiles of a page do not make those durable that were evicted while they were read.
TEST_F(FlushTest, TilesThatLeftTheTierWhileTheyWereReadAreWrittenAgain) {
  Open();
  SampleFragment left = SamplePage(0, 0);
  left.range = {{0, 1}, {0, 2}};
  ASSERT_TRUE(Commit(*store_, left).ok());
  ASSERT_TRUE(Flush(*store_).ok());
  for (uint64_t first = 100; first < 400; first += 50) {  // push it out of host memory
    CommitPages(first, 50);
    ASSERT_TRUE(Flush(*store_).ok());
  }
  below_->AfterNextGet([&] {
    EXPECT_TRUE(below_->inner().Remove(SampleKeyspace(0), std::span(&left.key, 1)).ok());
    SampleFragment right = SamplePage(0, 0);
    right.range = {{1, 2}, {0, 2}};
    const std::vector<std::byte> bytes = BytesOf(right);
    const FragmentWrite write = {MetaOf(right), bytes};
    EXPECT_TRUE(below_->inner().Put(std::span(&write, 1))[0].ok());
  });
  AcquireRequest request = RequestOf(0, 1);
  request.range = left.range;
  ASSERT_EQ(Acquire(*store_, request)->page_tiers.size(), 1u);
  ASSERT_TRUE(Flush(*store_).ok());
  EXPECT_EQ(store_->DurabilityOf(SampleKeyspace(0), SampleKey(0, 0), 1, SamplePage(0, 0).range),
            Durability::kDurable);
}

// Pages that the queue had no room for are queued when they have to leave. Until they are, a Flush
// finds them neither in the queue nor among those that it must write by itself.
TEST(WriteThroughTest, AFlushWaitsForPagesOnTheirWayToTheQueue) {
  const auto state = HostState::Open({.host = SmallStore("").host}, Clock::Real(), EventsOfNone());
  ASSERT_TRUE(state.ok()) << state.status();
  HostTier host(**state);
  HostRoom room(**state);
  MemoryTier below(100, Clock::Real(), EventsOfNone());
  WriteThrough writer({.bytes_max = uint64_t{1} << 20}, host, room, (*state)->losses, below,
                      [](const auto&, const auto&) {});
  const SampleFragment sample = SamplePage(0, 0);
  const FragmentMeta meta = MetaOf(sample);
  std::vector<Departure> departures;
  const Slot slot = room.Reserve(meta.keyspace, meta.bytes, NoneDeparts, &departures).value();
  const std::vector<std::byte> bytes = BytesOf(sample);
  std::copy(bytes.begin(), bytes.end(), room.Memory(slot).begin());
  const PageHandle page = host.Publish(meta, slot, Below::kAbsent, /*owed=*/true).value();
  host.EndWrite(page);

  std::promise<FlushReport> flushed;
  std::future<FlushReport> report = flushed.get_future();
  {
    const WriteThrough::Queueing queueing(writer);
    departures = host.RefAbsentBelow(meta.keyspace, std::span(&meta.key, 1));
    ASSERT_EQ(departures.size(), 1u);
    writer.Flush(std::nullopt, std::nullopt,
                 [&](const FlushReport& done) { flushed.set_value(done); });
    report.wait_for(std::chrono::milliseconds(300));  // a Flush that does not wait ends here
    writer.Enqueue(departures);
  }
  const absl::Status status = report.get().ToStatus();
  EXPECT_TRUE(status.ok()) << status;
  EXPECT_EQ(below.Find(meta.keyspace, meta.key).size(), 1u);
}

TEST_F(FlushTest, TilesThatAreThereInPartDoNotMakeAPageDurable) {
  Open();
  below_->Set(FaultTier::Fault::kPutFails);
  CommitPages(0, 1);
  SampleFragment part = SamplePage(0, 0);
  part.range = {{0, 1}, {0, 2}};
  const std::vector<std::byte> bytes = BytesOf(part);
  const FragmentWrite write = {MetaOf(part), bytes};
  ASSERT_TRUE(below_->inner().Put(std::span(&write, 1))[0].ok());
  below_->Set(FaultTier::Fault::kNone);
  const TileRange whole = SamplePage(0, 0).range;
  EXPECT_EQ(FlushPages(*store_).no_room_pages, 1u);
  EXPECT_EQ(store_->DurabilityOf(SampleKeyspace(0), SampleKey(0, 0), 1, whole),
            Durability::kPending);
  EXPECT_EQ(store_->DurabilityOf(SampleKeyspace(0), SampleKey(0, 0), 1, part.range),
            Durability::kDurable);
}

// Room is made by queueing pages: those that found room in the queue count, each once.
TEST(WriteThroughTest, CountsThePagesThatWereQueuedForRoom) {
  StoreOptions options = SmallStore("");
  options.host.bytes_max = ByteSize{uint64_t{1} << 20};
  const auto state = HostState::Open({.host = options.host}, Clock::Real(), EventsOfNone());
  ASSERT_TRUE(state.ok()) << state.status();
  HostTier host(**state);
  HostRoom room(**state);
  MemoryTier below(100, Clock::Real(), EventsOfNone());
  WriteThrough writer({.pages_max = 3, .bytes_max = uint64_t{1} << 20}, host, room,
                      (*state)->losses, below, [](const auto&, const auto&) {});
  // Two pages of two fragments each fill the memory. All four fragments have to leave, and three
  // find room in the queue.
  uint64_t bytes = 0;
  for (uint64_t page = 0; page < 2; ++page) {
    for (const uint16_t layer : {0, 1}) {
      SampleFragment sample = SamplePage(page, 0);
      sample.range = {{layer, static_cast<uint16_t>(layer + 1)}, {0, 1}};
      sample.tile_bytes = 240 << 10;
      const FragmentMeta meta = MetaOf(sample);
      bytes = meta.bytes;
      std::vector<Departure> departures;
      const auto slot = room.Reserve(meta.keyspace, meta.bytes, NoneDeparts, &departures);
      ASSERT_TRUE(slot.ok()) << slot.status();
      const std::vector<std::byte> content = BytesOf(sample);
      std::copy(content.begin(), content.end(), room.Memory(*slot).begin());
      const auto handle = host.Publish(meta, *slot, Below::kAbsent, /*owed=*/true);
      ASSERT_TRUE(handle.ok()) << handle.status();
      host.Unref(std::span(&*handle, 1));
    }
  }
  EXPECT_TRUE(absl::IsResourceExhausted(writer.Reserve(SampleKeyspace(0), bytes).status()));
  EXPECT_EQ(writer.demoted(), 2u);
  EXPECT_EQ(writer.dropped(), 1u);
}

}  // namespace
}  // namespace crumb::storage
