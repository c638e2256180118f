// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "storage/store/lease_table.h"

#include <atomic>
#include <memory>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "storage/host/host_room.h"
#include "tests/common/fake_clock.h"
#include "tests/storage/store_calls.h"

namespace crumb::storage {
namespace {

constexpr TileRange kRange = {{0, 2}, {0, 2}};

class LeaseTableTest : public testing::Test {
 protected:
  // Puts the first pages of a sequence into host memory and returns a reference to each.
  std::vector<PageHandle> AddPages(uint64_t sequence, uint64_t pages) {
    std::vector<PageHandle> handles;
    for (uint64_t page = 0; page < pages; ++page) {
      SampleFragment sample = SamplePage(sequence, page);
      sample.tile_bytes = 512;
      const FragmentMeta meta = MetaOf(sample);
      std::vector<Departure> departures;
      const auto slot = room_.Reserve(meta.keyspace, meta.bytes, NoneDeparts, &departures);
      EXPECT_TRUE(slot.ok()) << slot.status();
      const auto handle = host_.Publish(meta, *slot, Below::kRefused, /*owed=*/false);
      EXPECT_TRUE(handle.ok()) << handle.status();
      MissReason miss;
      const AcquireRequest request = RequestOf(sequence, page + 1);
      const std::vector<PageHandle> found = host_.RefPrefix(request, page, page + 1, &miss);
      EXPECT_EQ(found.size(), 1u);
      handles.insert(handles.end(), found.begin(), found.end());
      host_.EndWrite(*handle);
    }
    return handles;
  }
  LeaseId Lease(std::vector<PageHandle> handles) {
    const size_t fragments = handles.size();
    return leases_.Add(
        {.host = std::move(handles), .host_index = {}, .device = {}, .host_fragments = fragments},
        clock_.Now());
  }
  void Delete(uint64_t sequence, uint64_t pages) {
    host_.Remove(SampleKeyspace(0), RequestOf(sequence, pages).keys);
  }
  uint64_t references() {
    MutexLock lock(&state_->mutex);
    return state_->table.references();
  }
  uint64_t resident_bytes() {
    StoreStats stats;
    host_.AddStats(stats);
    return stats.host.resident_bytes;
  }
  StoreStats Stats() {
    StoreStats stats;
    leases_.AddStats(stats);
    return stats;
  }

  FakeClock clock_;
  FragmentTierEvents events_ = {.added = [](const KeyspaceId&, const PageKey&) {},
                                .removed = [](const KeyspaceId&, const PageKey&) {}};
  std::unique_ptr<HostState> state_ =
      HostState::Open({.host = SmallStore("").host}, clock_, events_).value();
  HostTier host_{*state_};
  HostRoom room_{*state_};
  DeviceTier devices_{
      {.device = {}, .is_below = [](const FragmentMeta&) { return false; }}, clock_, events_};
  LeaseTable leases_{host_, devices_, clock_};
};

TEST_F(LeaseTableTest, ALeaseNamesItsPagesUntilItIsReleased) {
  const LeaseId first = Lease(AddPages(1, 3));
  const LeaseId second = Lease(AddPages(2, 2));
  EXPECT_NE(first, second);
  const auto read = leases_.Read(first, kRange);
  ASSERT_TRUE(read.has_value());
  EXPECT_EQ(read->pages, 3u);
  ASSERT_EQ(read->fragments.size(), 3u);
  for (uint32_t page = 0; page < 3; ++page) EXPECT_EQ(read->fragments[page].page, page);
  EXPECT_TRUE(leases_.Read(first, {{2, 3}, {0, 1}})->fragments.empty());  // no tile of the pages

  EXPECT_TRUE(leases_.Release(first));
  EXPECT_FALSE(leases_.Release(first));
  EXPECT_FALSE(leases_.Read(first, kRange).has_value());
  EXPECT_FALSE(leases_.Read(0, kRange).has_value());
  EXPECT_TRUE(leases_.Read(second, kRange).has_value());
  EXPECT_EQ(references(), 2u);
}

TEST_F(LeaseTableTest, ADeletedPageStaysWhereItIsUntilTheLeaseEnds) {
  const LeaseId lease = Lease(AddPages(1, 2));
  const auto before = leases_.Read(lease, kRange);
  Delete(1, 2);
  const auto after = leases_.Read(lease, kRange);
  ASSERT_TRUE(after.has_value());
  ASSERT_EQ(after->fragments.size(), 2u);
  EXPECT_EQ(after->fragments[1].slab, before->fragments[1].slab);
  EXPECT_EQ(after->fragments[1].offset, before->fragments[1].offset);
  EXPECT_GT(resident_bytes(), 0u);
  EXPECT_TRUE(leases_.Release(lease));
  EXPECT_EQ(resident_bytes(), 0u);
}

TEST_F(LeaseTableTest, StatisticsCountLiveLeases) {
  EXPECT_EQ(Stats().leases, 0u);
  EXPECT_EQ(Stats().oldest_lease_seconds, 0);
  const LeaseId first = Lease(AddPages(1, 3));
  clock_.Advance(std::chrono::seconds(5));
  const LeaseId second = Lease(AddPages(2, 2));
  clock_.Advance(std::chrono::seconds(2));
  EXPECT_EQ(Stats().leases, 2u);
  EXPECT_EQ(Stats().leased_slots, 5u);
  EXPECT_EQ(Stats().oldest_lease_seconds, 7);
  leases_.Release(first);
  EXPECT_EQ(Stats().leases, 1u);
  EXPECT_EQ(Stats().leased_slots, 2u);
  EXPECT_EQ(Stats().oldest_lease_seconds, 2);
  leases_.Release(second);
  EXPECT_EQ(Stats().leases, 0u);
  EXPECT_EQ(Stats().leased_slots, 0u);
}

// The pages are deleted, so that the last reference frees them: a Read that lost them would return
// fewer fragments.
TEST_F(LeaseTableTest, AReadKeepsThePagesThatAReleaseGivesUp) {
  constexpr uint64_t kPages = 1000;
  constexpr int kRounds = 50;
  for (int round = 0; round < kRounds; ++round) {
    const LeaseId lease = Lease(AddPages(1, kPages));
    Delete(1, kPages);
    std::atomic<int> reads = 0;
    std::atomic<int> cut = 0;
    const auto read_until_released = [&] {
      while (const auto read = leases_.Read(lease, kRange)) {
        if (read->fragments.size() != kPages) ++cut;
        ++reads;
      }
    };
    std::thread one(read_until_released);
    std::thread other(read_until_released);
    while (reads < 2) std::this_thread::yield();
    EXPECT_TRUE(leases_.Release(lease));
    one.join();
    other.join();
    EXPECT_EQ(cut, 0);
    ASSERT_EQ(references(), 0u);
    ASSERT_EQ(resident_bytes(), 0u);
  }
}

}  // namespace
}  // namespace crumb::storage
