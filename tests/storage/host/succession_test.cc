// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
// A store that hands its host memory to the next one.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <set>

#include "common/mapping.h"
#include "gtest/gtest.h"
#include "storage/tiered_store.h"
#include "tests/common/fake_clock.h"
#include "tests/common/temporary_folder.h"
#include "tests/storage/store_calls.h"

namespace crumb::storage {
namespace {

constexpr uint64_t kMiB = uint64_t{1} << 20;
constexpr uint64_t kSlabs = 8;

class SuccessionTest : public testing::Test {
 protected:
  static StoreOptions Options(const std::string& folder = "", uint64_t mib = 16) {
    StoreOptions options = SmallStore(folder);
    options.host.bytes_max = ByteSize{mib * kMiB};
    options.host.slab_bytes = ByteSize{16 * kMiB / kSlabs};
    return options;
  }
  void Open(const StoreOptions& options, std::unique_ptr<HandedOverMemory> memory = nullptr,
            uint64_t host_bytes = UINT64_MAX) {
    gone_.clear();
    StoreEvents events;
    events.slab_gone = [this](uint32_t slab) { gone_.insert(slab); };
    StoreStart start;
    start.host_bytes = host_bytes;
    start.handed_over = std::move(memory);
    start.slabs_of_tenants = slabs_of_tenants_;
    auto opened = TieredStore::Open(options, clock_, events, std::move(start));
    ASSERT_TRUE(opened.ok()) << opened.status();
    store_ = *std::move(opened);
  }
  std::unique_ptr<HandedOverMemory> HandOver() {
    EXPECT_TRUE(store_->Stop(std::chrono::seconds(0)).ok());
    auto memory = store_->HandOver();
    EXPECT_TRUE(memory.ok()) << memory.status();
    store_.reset();
    return std::make_unique<HandedOverMemory>(*std::move(memory));
  }
  void Commit(uint64_t sequence, uint64_t pages) {
    for (uint64_t i = 0; i < pages; ++i) {
      ASSERT_TRUE(storage::Commit(*store_, SamplePage(sequence, i)).ok());
    }
  }
  // Pages of the sequence that are hits; every byte is checked.
  uint32_t Hits(uint64_t sequence, uint64_t pages, Tier tier = Tier::kHost) {
    const AcquireRequest request = RequestOf(sequence, pages);
    const auto result = Acquire(*store_, request);
    EXPECT_TRUE(result.ok()) << result.status();
    EXPECT_TRUE(AllRight(*store_, request, *result));
    for (const Tier found : result->page_tiers) EXPECT_EQ(found, tier);
    if (result->lease != 0) {
      EXPECT_TRUE(store_->Release(result->lease));
    }
    return result->hit_pages;
  }
  // Until nothing is missing; false when that does not come.
  bool Settle(uint64_t bytes = UINT64_MAX) {
    for (int round = 0; round < 100; ++round) {
      const auto missing = store_->GrowHost(bytes);
      EXPECT_TRUE(missing.ok()) << missing.status();
      if (*missing == 0) return true;
    }
    return false;
  }

  bool slabs_of_tenants_ = false;
  FakeClock clock_;
  TemporaryFolder folder_;
  std::set<uint32_t> gone_;
  std::unique_ptr<TieredStore> store_;
};

TEST_F(SuccessionTest, TheSamePagesAreServedFromTheSameMemory) {
  Open(Options());
  Commit(1, 300);
  Commit(2, 200);
  ASSERT_TRUE(store_->PutRecord("node-id", "x").ok());
  EXPECT_EQ(store_->DropKeyspace(SampleKeyspace(5), 9).value(), 0u);
  auto memory = HandOver();
  EXPECT_EQ(memory->image.pages.size(), 500u);
  // Only slabs with something in them.
  EXPECT_LT(memory->image.slabs, kSlabs);
  Open(Options(), std::move(memory), 0);
  EXPECT_EQ(store_->Records().value().size(), 1u);
  EXPECT_EQ(store_->Stats().host.pages, 500u);
  const auto result = Acquire(*store_, RequestOf(1, 300)).value();
  ASSERT_EQ(result.hit_pages, 300u);
  for (const FragmentRef& fragment : result.fragments) EXPECT_GE(fragment.slab, kSlabs);
  EXPECT_TRUE(store_->Release(result.lease));
  EXPECT_EQ(Hits(2, 200), 200u);
  // No process can write there, not even this one.
  for (const Slab& slab : store_->slabs()) {
    EXPECT_EQ(::mmap(nullptr, slab.bytes, PROT_WRITE, MAP_SHARED, slab.fd, 0), MAP_FAILED);
  }
}

TEST_F(SuccessionTest, ImpossibleTimesBecomePossibleOnes) {
  clock_.Advance(std::chrono::seconds(10));
  Open(Options());
  Commit(1, 4);
  auto memory = HandOver();
  ASSERT_EQ(memory->image.pages.size(), 4u);
  const TimePoint times[] = {TimePoint::min(), TimePoint::max(),
                             TimePoint(std::chrono::nanoseconds(-1)),
                             clock_.Now() + std::chrono::hours(1)};
  for (size_t i = 0; i < 4; ++i) {
    memory->image.pages[i].added = times[i];
    memory->image.pages[i].used = times[3 - i];
    memory->image.pages[i].pinned_until = times[i];
  }
  Open(Options(), std::move(memory), 0);
  EXPECT_EQ(Hits(1, 4), 4u);
  const AcquireRequest request = RequestOf(1, 4);
  EXPECT_EQ(store_->Delete(request.keyspace, request.keys).value(), 4u);
  const StoreStats stats = store_->Stats();
  for (const auto& seconds : {stats.host.page_lifetime_seconds, stats.host.reuse_gap_seconds}) {
    EXPECT_GE(seconds.sum, 0.0);
    EXPECT_LE(seconds.sum, 40.0);  // four pages, none before the clock's beginning
  }
}

TEST_F(SuccessionTest, PagesMoveToMemoryOfTheirOwn) {
  Open(Options());
  Commit(1, 300);
  Commit(2, 200);
  auto memory = HandOver();
  const uint32_t slabs = memory->image.slabs;
  Open(Options(), std::move(memory));
  ASSERT_TRUE(Settle());
  EXPECT_EQ(gone_.size(), slabs);
  EXPECT_EQ(store_->Stats().host.capacity_bytes, 16 * kMiB);
  EXPECT_EQ(store_->Stats().host.pages, 500u);
  const auto result = Acquire(*store_, RequestOf(1, 300)).value();
  ASSERT_EQ(result.hit_pages, 300u);
  for (const FragmentRef& fragment : result.fragments) EXPECT_LT(fragment.slab, kSlabs);
  EXPECT_TRUE(store_->Release(result.lease));
  EXPECT_EQ(Hits(2, 200), 200u);
  Commit(3, 100);
  EXPECT_EQ(Hits(3, 100), 100u);
  // And once more.
  memory = HandOver();
  EXPECT_EQ(memory->image.pages.size(), 600u);
  Open(Options(), std::move(memory));
  ASSERT_TRUE(Settle());
  EXPECT_EQ(Hits(1, 300) + Hits(2, 200) + Hits(3, 100), 600u);
}

TEST_F(SuccessionTest, AFullStoreMovesThroughOneSlab) {
  Open(Options());
  Commit(1, 1000);  // more than fits
  const uint64_t pages = store_->Stats().host.pages;
  ASSERT_LT(pages, 1000u);
  auto memory = HandOver();
  ASSERT_EQ(memory->image.slabs, kSlabs);
  Open(Options(), std::move(memory));
  EXPECT_EQ(store_->Stats().host.capacity_bytes, 18 * kMiB);
  ASSERT_TRUE(Settle());
  EXPECT_EQ(gone_.size(), kSlabs);
  EXPECT_EQ(store_->Stats().host.capacity_bytes, 16 * kMiB);
  // Slots are cut once more, so a few may find none at the end.
  EXPECT_GE(store_->Stats().host.pages, pages - pages / 50);
}

TEST_F(SuccessionTest, WritersHaveRoomWhilePagesMove) {
  Open(Options());
  Commit(1, 640);
  auto memory = HandOver();
  // One slab is not full. Another one has room for its pages.
  ASSERT_LT(memory->image.slabs, kSlabs);
  Open(Options(), std::move(memory), 2 * kMiB);
  ASSERT_TRUE(store_->GrowHost(0).ok());
  ASSERT_EQ(gone_.size(), 1u);
  // No memory was taken in place of the slab that was given up.
  Commit(2, 10);
  EXPECT_EQ(store_->Stats().host.pages, 650u);
  ASSERT_TRUE(Settle());
  EXPECT_EQ(Hits(1, 640) + Hits(2, 10), 650u);
}

TEST_F(SuccessionTest, LeasedPagesStayUntilTheyAreReleased) {
  Open(Options());
  Commit(1, 10);
  Open(Options(), HandOver());
  const AcquireRequest request = RequestOf(1, 4);
  const auto leased = Acquire(*store_, request).value();
  ASSERT_EQ(leased.hit_pages, 4u);
  EXPECT_FALSE(Settle());
  EXPECT_TRUE(gone_.empty());
  clock_.Advance(std::chrono::minutes(1));
  EXPECT_FALSE(Settle());
  EXPECT_TRUE(AllRight(*store_, request, leased));
  EXPECT_EQ(Hits(1, 10), 10u);
  EXPECT_EQ(store_->Delete(request.keyspace, std::span(request.keys).first(1)).value(), 1u);
  EXPECT_FALSE(Settle());
  EXPECT_TRUE(AllRight(*store_, request, leased)) << "a deleted page is there for who leased it";
  EXPECT_TRUE(store_->Release(leased.lease));
  EXPECT_TRUE(Settle());
  EXPECT_EQ(gone_.size(), 1u);
}

TEST_F(SuccessionTest, WithoutRoomSomePagesLeaveInTheEnd) {
  Open(Options());
  Commit(1, 1000);
  Open(Options(), HandOver(), 0);
  const uint64_t pages = store_->Stats().host.pages;
  EXPECT_TRUE(absl::IsResourceExhausted(storage::Commit(*store_, SamplePage(9, 0)).status()));
  EXPECT_EQ(store_->Stats().host.pages, pages) << "nothing leaves for slots that no page can use";
  ASSERT_TRUE(store_->GrowHost(0).ok());
  EXPECT_EQ(store_->Stats().host.pages, pages);
  clock_.Advance(std::chrono::seconds(6));
  ASSERT_TRUE(store_->GrowHost(0).ok());
  EXPECT_EQ(gone_.size(), 1u) << "one slab's pages";
  EXPECT_GE(store_->Stats().host.pages, pages - pages / kSlabs - 1);
  // While its memory does not come back, no other goes for it.
  for (int i = 0; i < 10; ++i) {
    clock_.Advance(std::chrono::minutes(1));
    ASSERT_TRUE(store_->GrowHost(0).ok());
  }
  EXPECT_EQ(gone_.size(), 1u);
  ASSERT_TRUE(Settle(2 * kMiB));
  EXPECT_GE(store_->Stats().host.pages, pages - pages / kSlabs - pages / 50);
}

TEST_F(SuccessionTest, ASmallerSuccessorTakesWhatItHasRoomFor) {
  Open(Options());
  Commit(1, 800);
  const uint64_t pages = store_->Stats().host.pages;
  Open(Options("", 5), HandOver());
  const uint64_t kept = store_->Stats().host.pages;
  EXPECT_GT(kept, pages / kSlabs);
  EXPECT_LT(kept, pages * 5 / 16 + 1);
  Hits(1, 800);
  EXPECT_TRUE(Settle());
  EXPECT_EQ(store_->Stats().host.capacity_bytes, 5 * kMiB);
  // Adopts no memory, and memory of another slab size.
  StoreOptions other = Options("", 1);
  other.host.slab_bytes = ByteSize{1 * kMiB};
  Open(other, HandOver());
  EXPECT_EQ(store_->Stats().host.pages, 0u);
  Commit(1, 10);
  other.host.bytes_max = ByteSize{12 * kMiB};
  other.host.slab_bytes = ByteSize{4 * kMiB};
  Open(other, HandOver());
  EXPECT_EQ(Hits(1, 10), 10u);
  for (const Slab& slab : store_->slabs()) EXPECT_EQ(slab.bytes, 1 * kMiB);
}

TEST_F(SuccessionTest, TheNextToLeaveStaysTheNextToLeave) {
  Open(Options());
  for (uint64_t sequence = 0; sequence < 8; ++sequence) {
    clock_.Advance(std::chrono::seconds(1));
    Commit(sequence, 80);
  }
  clock_.Advance(std::chrono::seconds(1));
  EXPECT_EQ(Hits(0, 80), 80u);  // the oldest is the youngest now
  Open(Options(), HandOver());
  ASSERT_TRUE(Settle());
  Commit(20, 400);
  EXPECT_EQ(Hits(0, 80), 80u);
  EXPECT_LT(Hits(1, 80), 80u);
}

TEST_F(SuccessionTest, WhatWasQueuedForTheSsdIsWrittenByTheSuccessor) {
  Open(Options(folder_.path()));
  Commit(1, 200);
  Open(Options(folder_.path()), HandOver());
  EXPECT_EQ(Hits(1, 200), 200u);
  EXPECT_EQ(Flush(*store_).value(), 200u);
  store_.reset();
  Open(Options(folder_.path()));
  EXPECT_EQ(Hits(1, 200, Tier::kSsd), 200u);
}

TEST_F(SuccessionTest, LossesAreReportedByTheSuccessor) {
  Open(Options(folder_.path(), /*mib=*/2));
  const uint64_t mark = store_->FlushMark(std::nullopt);
  store_->SetOwner(SampleKeyspace(0), "a");
  auto memory = HandOver();
  ASSERT_TRUE(memory->image.losses.has_value());
  memory->image.losses->all.pages = 7;
  memory->image.losses->tenants["a"] = {.pages = 7, .reported = 2};
  Open(Options(folder_.path(), /*mib=*/2), std::move(memory));
  store_->SetOwner(SampleKeyspace(0), "a");
  EXPECT_EQ(FlushPages(*store_, mark).lost_pages, 7u);
  EXPECT_EQ(FlushPages(*store_, mark, "a").lost_pages, 7u);
  EXPECT_EQ(FlushPages(*store_, std::nullopt, "a").lost_pages, 5u);
  // And by the next one, as far as they were not reported.
  Open(Options(folder_.path(), /*mib=*/2), HandOver());
  EXPECT_EQ(FlushPages(*store_, mark, "a").lost_pages, 7u);
  EXPECT_EQ(FlushPages(*store_, std::nullopt, "a").lost_pages, 0u);
  EXPECT_EQ(FlushPages(*store_).lost_pages, 7u);
  EXPECT_TRUE(FlushPages(*store_).ToStatus().ok());
}

TEST_F(SuccessionTest, PagesThatAreLeftOutAreLostUnlessTheSsdHasThem) {
  Open(Options(folder_.path()));
  Commit(1, 50);
  ASSERT_TRUE(Flush(*store_).ok());
  const uint64_t mark = store_->FlushMark(std::nullopt);
  store_.reset();
  // Without the SSD tier nothing more of it is written; then it is there again.
  auto memory = [&] {
    Open(Options());
    Commit(1, 50);
    Commit(2, 30);
    return HandOver();
  }();
  const uint64_t mark_without_ssd = memory->image.losses->mark_base;
  ASSERT_LT(mark, mark_without_ssd);
  memory->slabs.clear();
  memory->image.slabs = 0;
  Open(Options(folder_.path()), std::move(memory));
  EXPECT_EQ(store_->Stats().host.pages, 0u);
  EXPECT_EQ(FlushPages(*store_, mark_without_ssd).lost_pages, 30u);
  const FlushReport report = FlushPages(*store_);
  EXPECT_EQ(report.lost_pages, 30u) << "a caller without a mark learns of them, too";
  EXPECT_EQ(report.durable_pages, 50u);
  EXPECT_TRUE(Flush(*store_).ok()) << "they were reported";
}

TEST_F(SuccessionTest, ADroppedGenerationStaysDropped) {
  Open(Options(folder_.path()));
  Commit(1, 20);
  auto memory = HandOver();
  Open(Options(folder_.path()));
  ASSERT_TRUE(store_->DropKeyspace(SampleKeyspace(0), 2).ok());
  store_.reset();
  Open(Options(folder_.path()), std::move(memory));
  EXPECT_EQ(store_->Stats().host.pages, 0u);
}

TEST_F(SuccessionTest, AnImageThatLiesGivesNoWrongPage) {
  const auto handed_over = [this] {
    Open(Options());
    Commit(1, 50);
    return HandOver();
  };
  auto swapped = handed_over();
  std::swap(swapped->image.pages[3].key, swapped->image.pages[7].key);
  Open(Options(), std::move(swapped));
  EXPECT_EQ(store_->Stats().host.pages, 48u);
  Hits(1, 50);

  auto overlapping = handed_over();
  overlapping->image.pages[3].fragments[0].slot = overlapping->image.pages[7].fragments[0].slot;
  overlapping->image.pages[4].fragments[0].slot.offset += 512;
  overlapping->image.pages[5].generation += 1;
  Open(Options(), std::move(overlapping));
  EXPECT_LE(store_->Stats().host.pages, 47u);
  EXPECT_GE(store_->Stats().host.pages, 44u);
  Hits(1, 50);
  EXPECT_TRUE(Settle());
  Hits(1, 50);

  auto writable = handed_over();
  writable->slabs[0] = CreateMemfd("not-sealed", writable->image.slab_bytes).value();
  Open(Options(), std::move(writable));
  EXPECT_EQ(store_->Stats().host.pages, 0u);
  EXPECT_TRUE(Settle());

  auto missing = handed_over();
  missing->slabs.clear();
  Open(Options(), std::move(missing));
  EXPECT_EQ(store_->Stats().host.pages, 0u);
  Commit(2, 5);
  EXPECT_EQ(Hits(2, 5), 5u);
}

// Stores whose slabs are a tenant's each: keyspaces 1 to 3 are of one each, 4 is of none.
class TenantSuccessionTest : public SuccessionTest {
 protected:
  TenantSuccessionTest() { slabs_of_tenants_ = true; }

  static constexpr uint64_t kTenants = 3;

  static KeyspaceId Keyspace(uint64_t tenant) { return SampleKeyspace(tenant); }
  void OpenOwn(std::unique_ptr<HandedOverMemory> memory = nullptr,
               uint64_t host_bytes = UINT64_MAX) {
    Open(Options(), std::move(memory), host_bytes);
    for (uint64_t tenant = 1; tenant <= kTenants; ++tenant) {
      ASSERT_TRUE(store_->SetTenant(Keyspace(tenant), "tenant " + std::to_string(tenant)).ok());
    }
    ASSERT_TRUE(store_->SetTenant(Keyspace(kTenants + 1), "").ok());
  }
  void CommitOf(uint64_t tenant, uint64_t pages) {
    for (uint64_t i = 0; i < pages; ++i) {
      SampleFragment page = SamplePage(tenant, i);
      page.keyspace = Keyspace(tenant);
      ASSERT_TRUE(storage::Commit(*store_, page).ok());
    }
  }
  AcquireRequest RequestFor(uint64_t tenant, uint64_t pages) {
    AcquireRequest request = RequestOf(tenant, pages);
    request.keyspace = Keyspace(tenant);
    return request;
  }
  // Hits of a tenant's pages, of which every byte is checked, and that they lie in slabs which this
  // tenant alone is given.
  uint32_t HitsOf(uint64_t tenant, uint64_t pages) {
    const AcquireRequest request = RequestFor(tenant, pages);
    const auto result = Acquire(*store_, request);
    EXPECT_TRUE(result.ok()) << result.status();
    EXPECT_TRUE(AllRight(*store_, request, *result));
    std::set<uint32_t> slabs;
    for (const FragmentRef& fragment : result->fragments) slabs.insert(fragment.slab);
    for (const uint32_t slab : slabs) {
      for (uint64_t other = 1; other <= kTenants + 1; ++other) {
        EXPECT_EQ(store_->OpenSlab(slab, Keyspace(other)).ok(), other == tenant)
            << "slab " << slab << " of " << tenant << " for " << other;
      }
    }
    if (result->lease != 0) {
      EXPECT_TRUE(store_->Release(result->lease));
    }
    return result->hit_pages;
  }
};

TEST_F(TenantSuccessionTest, TenantsKeepTheirPagesAndNothingMore) {
  OpenOwn();
  for (uint64_t tenant = 1; tenant <= kTenants + 1; ++tenant) CommitOf(tenant, 60 * tenant);
  for (int succession = 0; succession < 3; ++succession) {
    auto memory = HandOver();
    EXPECT_EQ(memory->image.pages.size(), 600u);
    EXPECT_EQ(memory->image.tenants.size(), memory->image.slabs);
    OpenOwn(std::move(memory), 0);
    for (uint64_t tenant = 1; tenant <= kTenants + 1; ++tenant) {
      EXPECT_EQ(HitsOf(tenant, 60 * tenant), 60 * tenant) << tenant;
    }
    if (succession == 1) continue;  // handed over from where they are
    ASSERT_TRUE(Settle());
    EXPECT_EQ(store_->Stats().host.capacity_bytes, 16 * kMiB);
    for (uint64_t tenant = 1; tenant <= kTenants + 1; ++tenant) {
      EXPECT_EQ(HitsOf(tenant, 60 * tenant), 60 * tenant) << tenant;
    }
  }
}

TEST_F(TenantSuccessionTest, AFullStoreMovesThroughOneSlab) {
  OpenOwn();
  for (uint64_t tenant = 1; tenant <= kTenants; ++tenant) CommitOf(tenant, 1000);
  const uint64_t pages = store_->Stats().host.pages;
  auto memory = HandOver();
  EXPECT_EQ(memory->image.pages.size(), pages);
  OpenOwn(std::move(memory), 0);
  EXPECT_EQ(store_->Stats().host.pages, pages);
  ASSERT_TRUE(Settle());
  EXPECT_EQ(store_->Stats().host.capacity_bytes, 16 * kMiB);
  EXPECT_EQ(store_->Stats().host.pages, pages);
  for (uint64_t tenant = 1; tenant <= kTenants; ++tenant) HitsOf(tenant, 1000);
  // And goes on as before.
  CommitOf(kTenants, 5);
}

TEST_F(TenantSuccessionTest, MixedSlabsAreNoTenants) {
  Open(Options());
  for (uint64_t tenant = 1; tenant <= kTenants + 1; ++tenant) CommitOf(tenant, 20);
  auto memory = HandOver();
  EXPECT_TRUE(memory->image.tenants.empty());
  OpenOwn(std::move(memory), 0);
  for (uint64_t tenant = 1; tenant <= kTenants; ++tenant) EXPECT_EQ(HitsOf(tenant, 20), 0u);
  const AcquireRequest request = RequestFor(kTenants + 1, 20);
  const auto result = Acquire(*store_, request);
  ASSERT_TRUE(result.ok());
  EXPECT_EQ(result->hit_pages, 20u);
  for (const FragmentRef& fragment : result->fragments) {
    EXPECT_FALSE(store_->OpenSlab(fragment.slab, request.keyspace).ok());
  }
}

TEST_F(TenantSuccessionTest, AnImageThatLiesAboutTenantsMixesNothing) {
  OpenOwn();
  for (uint64_t tenant = 1; tenant <= 2; ++tenant) CommitOf(tenant, 20);
  auto memory = HandOver();
  ASSERT_EQ(memory->image.slabs, 2u);
  // The first tenant's slab is the second's: its pages are of a keyspace that becomes another's.
  memory->image.tenants[0] = memory->image.tenants[1];
  OpenOwn(std::move(memory), 0);
  uint32_t hits = 0;
  for (uint64_t tenant = 1; tenant <= 2; ++tenant) hits += HitsOf(tenant, 20);
  EXPECT_EQ(hits, 20u);
}

}  // namespace
}  // namespace crumb::storage
