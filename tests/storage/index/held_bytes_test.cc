// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
// Bounds of the bytes that one tenant may keep from being reused, by leases, pins, deletions and
// commits.
#include "storage/index/held_bytes.h"

#include <memory>
#include <vector>

#include "gtest/gtest.h"
#include "tests/common/temporary_folder.h"
#include "tests/storage/store_calls.h"

namespace crumb::storage {
namespace {

TEST(HeldBytes, ATenantKeepsItsPartOfWhatOthersLeave) {
  HeldBytes held;
  HeldBytes::Account a, a2, b;
  held.Add(a, 7);
  EXPECT_TRUE(held.Fits(a, UINT64_MAX)) << "no bound, and nothing is counted";
  EXPECT_EQ(held.used(), 0u);
  held.SetBound(100, 50);
  held.SetTenant(a, "a");
  held.SetTenant(a2, "a");
  held.SetTenant(b, "b");
  held.Add(a, 30);
  held.Add(a2, 20);
  EXPECT_FALSE(held.Fits(a, 1));
  EXPECT_TRUE(held.Fits(a, 0));
  EXPECT_TRUE(held.Fits(b, 25));
  EXPECT_FALSE(held.Fits(b, 26));
  held.SetTenant(a2, "b");
  EXPECT_FALSE(held.Fits(b, 16)) << "20 of the 70 that a leaves";
  EXPECT_TRUE(held.Fits(b, 15));
  held.Give(a, 30);
  held.Give(a2, 20);
  EXPECT_EQ(held.used(), 0u);
}

class HeldStoreTest : public testing::Test {
 protected:
  void Open(const std::string& folder = "") {
    const StoreOptions options = SmallStore(folder);
    auto opened =
        TieredStore::Open(options, Clock::Real(), {}, {.tenant_part_max_percent = kPercent});
    ASSERT_TRUE(opened.ok()) << opened.status();
    store_ = *std::move(opened);
    store_->SetOwner(SampleKeyspace(0), "a");
    store_->SetOwner(SampleKeyspace(1), "b");
    part_ = options.host.bytes_max.value * kPercent / 100;
  }

  static SampleFragment Tile(uint64_t sequence) {
    SampleFragment tile = SamplePage(sequence, 0);
    tile.range = kTile;
    return tile;
  }
  static AcquireRequest Page(uint64_t sequence, uint64_t pages = 1) {
    AcquireRequest request = RequestOf(sequence, pages);
    request.within_part = true;
    return request;
  }
  uint64_t held() const { return store_->Stats().held_bytes; }
  // Pages of b fill the room that a leaves.
  void ExpectRoomForTheOther() {
    const uint64_t pages = part_ / kPageBytes * 9 / 10;
    for (uint64_t i = 0; i < pages; ++i) {
      SampleFragment sample = SamplePage(1'000'000, i);
      sample.keyspace = SampleKeyspace(1);
      sample.parent = {};
      ASSERT_TRUE(Commit(*store_, sample).ok()) << "page " << i << " of " << pages;
    }
  }

  static constexpr int64_t kPercent = 50;
  static constexpr TileRange kTile = {{0, 1}, {0, 1}};
  static constexpr uint64_t kPageBytes = 4 * 4608;  // and a header
  TemporaryFolder folder_;
  std::unique_ptr<TieredStore> store_;
  uint64_t part_ = 0;
};

TEST_F(HeldStoreTest, ADeletedPageCountsUntilItsLeaseEnds) {
  Open();
  std::vector<LeaseId> leases;
  const AcquireRequest request = Page(1);
  while (true) {
    ASSERT_TRUE(Commit(*store_, SamplePage(1, 0)).ok()) << leases.size() << " copies";
    const AcquireResult result = Acquire(*store_, request).value();
    ASSERT_EQ(store_->Delete(request.keyspace, request.keys).value(), 1u);
    if (result.part_full) {
      EXPECT_EQ(result.miss_reason, MissReason::kBusy);
      EXPECT_EQ(result.hit_pages, 0u);
      break;
    }
    ASSERT_EQ(result.hit_pages, 1u);
    leases.push_back(result.lease);
    ASSERT_LT(leases.size(), part_ / kPageBytes + 1) << "more than the part";
  }
  EXPECT_GT(leases.size(), part_ / kPageBytes * 9 / 10);
  EXPECT_GE(held(), leases.size() * kPageBytes);
  EXPECT_LE(held(), part_);
  EXPECT_GE(store_->KeyspaceBytes(request.keyspace), leases.size() * kPageBytes) << "for the quota";
  ExpectRoomForTheOther();
  for (const LeaseId lease : leases) ASSERT_TRUE(store_->Release(lease));
  EXPECT_EQ(held(), 0u);
  EXPECT_EQ(store_->KeyspaceBytes(request.keyspace), 0u);
}

TEST_F(HeldStoreTest, ALeaseOfOneTileCountsTheWholePage) {
  Open();
  std::vector<LeaseId> leases;
  for (uint64_t sequence = 0;; ++sequence) {
    ASSERT_TRUE(Commit(*store_, Tile(sequence)).ok());
    ASSERT_TRUE(Commit(*store_, SamplePage(sequence, 0)).ok());
    AcquireRequest request = Page(sequence);
    request.range = kTile;
    const AcquireResult result = Acquire(*store_, request).value();
    if (result.part_full) break;
    leases.push_back(result.lease);
    EXPECT_GE(held(), leases.size() * kPageBytes);
    ASSERT_LE(held(), part_);
  }
  EXPECT_GT(leases.size(), part_ / kPageBytes / 2);
  ExpectRoomForTheOther();
  for (const LeaseId lease : leases) store_->Release(lease);
  EXPECT_EQ(held(), 0u);
}

// Pins, or leases, of pages of one tile each, and then the rest of the pages.
TEST_F(HeldStoreTest, ACommitToAHeldPageCountsAndIsRefusedAtThePart) {
  for (const bool pins : {true, false}) {
    Open();
    const uint64_t pages = 2 * part_ / kPageBytes;
    const TimePoint until = Clock::Real().Now() + std::chrono::hours(1);
    std::vector<LeaseId> leases;
    for (uint64_t sequence = 0; sequence < pages; ++sequence) {
      ASSERT_TRUE(Commit(*store_, Tile(sequence)).ok());
      AcquireRequest request = Page(sequence);
      request.range = kTile;
      if (pins) {
        ASSERT_EQ(store_->Pin(request.keyspace, request.keys, until).value(), 1u);
      } else {
        leases.push_back(Acquire(*store_, request)->lease);
        ASSERT_NE(leases.back(), 0u);
      }
    }
    uint64_t refused = 0;
    for (uint64_t sequence = 0; sequence < pages; ++sequence) {
      const absl::Status status = Commit(*store_, SamplePage(sequence, 0)).status();
      if (status.ok()) continue;
      EXPECT_TRUE(absl::IsResourceExhausted(status)) << status;
      ++refused;
    }
    EXPECT_GT(refused, 0u);
    EXPECT_LE(held(), part_);
    EXPECT_GT(held(), part_ * 8 / 10);
    ExpectRoomForTheOther();
    const AcquireRequest all = Page(0);
    for (uint64_t sequence = 0; sequence < pages && pins; ++sequence) {
      store_->Unpin(all.keyspace, Page(sequence).keys);
    }
    for (const LeaseId lease : leases) store_->Release(lease);
    EXPECT_EQ(held(), 0u);
  }
}

TEST_F(HeldStoreTest, APageCountsOnceForAllItsLeasesAndItsPin) {
  Open();
  ASSERT_TRUE(Commit(*store_, SamplePage(1, 0)).ok());
  ASSERT_TRUE(Commit(*store_, SamplePage(1, 1)).ok());
  const AcquireRequest request = Page(1, 2);
  const TimePoint until = Clock::Real().Now() + std::chrono::hours(1);
  const LeaseId first = Acquire(*store_, request)->lease;
  const uint64_t both = held();
  EXPECT_GE(both, 2 * kPageBytes);
  const LeaseId second = Acquire(*store_, request)->lease;
  const std::vector<PageKey> one = {request.keys[0]};
  EXPECT_EQ(store_->Pin(request.keyspace, one, until).value(), 1u);
  EXPECT_EQ(store_->Pin(request.keyspace, one, until).value(), 1u);
  EXPECT_EQ(held(), both);
  EXPECT_TRUE(store_->Release(first));
  EXPECT_EQ(held(), both);
  EXPECT_TRUE(store_->Release(second));
  EXPECT_EQ(held(), both / 2) << "the pinned one";
  EXPECT_EQ(store_->Delete(request.keyspace, one).value(), 1u);
  EXPECT_EQ(held(), 0u) << "its pin ended with it";
  EXPECT_EQ(store_->Unpin(request.keyspace, one), 0u);
  EXPECT_EQ(held(), 0u);
}

TEST_F(HeldStoreTest, APinnedPageOfTheSsdTierCounts) {
  Open(folder_.path());
  ASSERT_TRUE(Commit(*store_, SamplePage(1, 0)).ok());
  ASSERT_TRUE(Flush(*store_).ok());
  const AcquireRequest request = Page(1);
  const auto in_host = [&] {
    const LookupResult found = store_->Lookup(request);
    return found.hit_pages == 1 && found.page_tiers[0] == Tier::kHost;
  };
  // Until it has left host memory, where the least recently used go first.
  for (uint64_t i = 0; in_host(); ++i) {
    const SampleFragment other = SamplePage(2 + i, 0);
    ASSERT_TRUE(Commit(*store_, other).ok());
    ASSERT_LT(i, 4 * part_ / kPageBytes);
  }
  const TimePoint until = Clock::Real().Now() + std::chrono::hours(1);
  EXPECT_EQ(store_->Pin(request.keyspace, request.keys, until).value(), 1u);
  const uint64_t below = held();
  EXPECT_GE(below, kPageBytes);
  const LeaseId lease = Acquire(*store_, request)->lease;
  EXPECT_GE(held(), 2 * kPageBytes) << "the copy in host memory is another one";
  EXPECT_TRUE(store_->Release(lease));
  EXPECT_EQ(held(), below);
  EXPECT_EQ(store_->Delete(request.keyspace, request.keys).value(), 1u);
  EXPECT_EQ(held(), 0u);
}

}  // namespace
}  // namespace crumb::storage
