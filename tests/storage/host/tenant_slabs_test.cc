// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
// Slabs of tenants: whose pages lie where, and how a slab goes from one to another.
#include <algorithm>
#include <map>
#include <random>
#include <set>
#include <vector>

#include "common/mapping.h"
#include "gtest/gtest.h"
#include "tests/common/cpu_seconds.h"
#include "tests/storage/host/tenant_slabs_fixture.h"

namespace crumb::storage {
namespace {

TEST_F(TenantSlabsTest, OnlyTheTenantOfASlabGetsItAndNoneWrites) {
  ASSERT_TRUE(Store(1, 0, 0).ok());
  ASSERT_TRUE(Store(2, 0, 0).ok());
  const uint32_t first = *SlabsOf(1, 1).begin();
  const uint32_t second = *SlabsOf(2, 1).begin();
  EXPECT_NE(first, second);
  EXPECT_TRUE(store_->OpenSlab(first, SampleKeyspace(1)).ok());
  for (const auto& [slab, tenant] : {std::pair{first, 2}, std::pair{second, 1}, std::pair{first, 9},
                                     std::pair{uint32_t{99}, 1}}) {
    EXPECT_TRUE(absl::IsPermissionDenied(
        store_->OpenSlab(slab, SampleKeyspace(static_cast<uint64_t>(tenant))).status()));
  }
  const UniqueFd fd = store_->OpenSlab(first, SampleKeyspace(1)).value();
  EXPECT_FALSE(Mapping::Of(fd.get(), kSlabBytes, Mapping::Access::kReadWrite).ok());
}

TEST_F(TenantSlabsTest, ATenantAloneUsesEverything) {
  Fill(1);
  EXPECT_EQ(SlabsOf(1, kFilling).size(), kSlabs);
}

TEST_F(TenantSlabsTest, ASlabThatMovesHoldsNothingOfBefore) {
  Fill(1);
  ASSERT_TRUE(Store(2, 0, 0).ok());
  const uint32_t slab = *SlabsOf(2, 1).begin();
  ASSERT_EQ(gone_.size(), 1u);
  EXPECT_NE(*gone_.begin(), slab);  // the same memory under another number
  EXPECT_EQ(*gone_.begin() % kSlabs, slab % kSlabs);
  EXPECT_EQ(store_->Stats().slab_moves, 1u + kSlabs);  // four from no tenant to the first
  const Mapping mapped = Map(2, slab);
  const size_t fragment_bytes = BytesOf(Page(2, 0, 0)).size();
  const auto zeros = std::count(mapped.bytes().begin(), mapped.bytes().end(), std::byte{0});
  EXPECT_GE(static_cast<size_t>(zeros), kSlabBytes - fragment_bytes);
  const auto leased = Lease(2, 0);
  ASSERT_TRUE(leased.ok());
  EXPECT_TRUE(IsRight(store_->Bytes(leased->fragments.at(0)), SampleKeyspace(2), SampleKey(0, 0),
                      leased->fragments[0].tiles_bytes));
  EXPECT_TRUE(absl::IsPermissionDenied(store_->OpenSlab(slab, SampleKeyspace(1)).status()));
}

// A notice that the slab is gone reaches some sessions after the slab has pages of its new owner.
TEST_F(TenantSlabsTest, ASlabThatWasNeverWrittenToMovesUnderAnotherNumber) {
  ASSERT_TRUE(Store(1, 0, 0).ok());  // all slabs were of no tenant
  const uint32_t slab = *SlabsOf(1, 1).begin();
  ASSERT_EQ(gone_.size(), 1u);
  EXPECT_NE(*gone_.begin(), slab);
  EXPECT_EQ(*gone_.begin() % kSlabs, slab % kSlabs);
}

TEST_F(TenantSlabsTest, ASlabThatIsMappedGoesToNoOther) {
  Fill(1);
  std::map<uint32_t, Mapping> mapped;
  for (const uint32_t slab : SlabsOf(1, kFilling)) mapped.emplace(slab, Map(1, slab));
  ASSERT_EQ(mapped.size(), kSlabs);
  EXPECT_TRUE(absl::IsResourceExhausted(Store(2, 0, 0)));
  ASSERT_EQ(gone_.size(), 1u);
  const uint32_t slab = *gone_.begin();
  EXPECT_EQ(store_->Stats().slabs_gone, 1u);
  EXPECT_EQ(store_->Stats().host.capacity_bytes, kSlabs * kSlabBytes);
  // Mapped bytes still stay as they were.
  const std::vector<std::byte> before(mapped.at(slab).bytes().begin(),
                                      mapped.at(slab).bytes().end());
  for (int i = 0; i < 10; ++i) EXPECT_FALSE(Store(2, 0, 0).ok());
  EXPECT_TRUE(std::equal(before.begin(), before.end(), mapped.at(slab).data()));
  EXPECT_TRUE(Store(1, 5000, 0).ok());  // the first goes on in the others
  mapped.erase(slab);
  EXPECT_TRUE(Store(2, 0, 0).ok());
  EXPECT_EQ(*SlabsOf(2, 1).begin() % kSlabs, slab % kSlabs);
}

TEST_F(TenantSlabsTest, ASlabThatIsKeptIsRevokedInTimeAndWithinBounds) {
  Fill(1);
  const auto mapped = MapAll(1);
  ASSERT_EQ(mapped.size(), kSlabs);
  EXPECT_TRUE(absl::IsResourceExhausted(Store(2, 0, 0)));
  clock_.Advance(kLetGo - std::chrono::milliseconds(1));
  EXPECT_TRUE(absl::IsResourceExhausted(Store(2, 0, 0)));
  EXPECT_EQ(store_->Stats().slabs_gone, 1u);  // the next one is not given up yet
  EXPECT_EQ(store_->Stats().slabs_revoked, 0u);
  clock_.Advance(std::chrono::milliseconds(1));
  ASSERT_TRUE(Store(2, 0, 0).ok());
  EXPECT_EQ(store_->Stats().slabs_revoked, 1u);
  EXPECT_FALSE(gone_.contains(*SlabsOf(2, 1).begin()));
  // Another one, and no third of this tenant's.
  for (uint64_t i = 1; i < kFilling; ++i) Store(2, i, 0).IgnoreError();
  clock_.Advance(kLetGo);
  for (uint64_t i = 1; i < kFilling; ++i) Store(2, i, 0).IgnoreError();
  EXPECT_EQ(store_->Stats().slabs_revoked, 2u);
  EXPECT_EQ(SlabsOf(2, kFilling).size(), kSlabs / 2);
  // The third gets a slab of the second, which keeps none.
  bool stored = false;
  for (int round = 0; round < 10 && !stored; ++round) {
    stored = Store(3, 0, 0).ok();
    clock_.Advance(kLetGo);
  }
  EXPECT_TRUE(stored);
  EXPECT_EQ(store_->Stats().slabs_revoked, 2u);
}

TEST_F(TenantSlabsTest, ATenantThatKeepsSlabsTakesNoneFromOthers) {
  Fill(1);
  std::vector<Mapping> kept;
  for (uint64_t round = 0; round < 20; ++round) {
    if (Store(2, round, 0).ok()) {
      const AcquireRequest request = [&] {
        AcquireRequest wanted = RequestOf(round, 1);
        wanted.keyspace = SampleKeyspace(2);
        return wanted;
      }();
      for (const uint32_t slab : SlabsOf(2, round + 1)) kept.push_back(Map(2, slab));
      ASSERT_TRUE(store_->Delete(request.keyspace, request.keys).ok());
    }
    Store(3, round, 0).IgnoreError();  // takes the second's slabs, which are empty
    EXPECT_TRUE(Store(1, round, 0).ok()) << round;
    clock_.Advance(kLetGo);
  }
  EXPECT_FALSE(kept.empty());
  EXPECT_LE(store_->Stats().slabs_revoked, 2u);
  EXPECT_LE(store_->Stats().slabs_gone, kSlabs / 2);  // its part while it is one of two
  EXPECT_FALSE(SlabsOf(1, kFilling).empty());
  EXPECT_TRUE(Store(3, 0, 0).ok());
}

TEST_F(TenantSlabsTest, ASlabWhoseMemoryDoesNotComeBackStaysOutOfUse) {
  Fill(1);
  free_bytes_ = kSlabBytes / 2;  // bytes that pinned pages leave
  EXPECT_TRUE(absl::IsResourceExhausted(Store(2, 0, 0)));
  EXPECT_EQ(store_->Stats().slab_renewals_failed, 1u);
  EXPECT_TRUE(Store(1, 5000, 0).ok());
  free_bytes_ = UINT64_MAX / 2;
  clock_.Advance(std::chrono::seconds(1));
  EXPECT_TRUE(Store(2, 0, 0).ok());
  EXPECT_EQ(store_->Stats().slabs_gone, 0u);
}

TEST_F(TenantSlabsTest, LeasedPagesStayUntilTheyAreReleased) {
  Fill(1);
  std::vector<LeaseId> leases;
  for (uint64_t i = 0; i < kFilling; ++i) {
    const auto leased = Lease(1, i);
    if (leased.ok() && leased->lease != 0) leases.push_back(leased->lease);
  }
  EXPECT_TRUE(absl::IsResourceExhausted(Store(2, 0, 0)));
  EXPECT_EQ(store_->Stats().slabs_closing, 1u);
  EXPECT_TRUE(gone_.empty());
  for (const LeaseId lease : leases) store_->Release(lease);
  clock_.Advance(std::chrono::seconds(1));
  EXPECT_TRUE(Store(2, 0, 0).ok());
  EXPECT_EQ(store_->Stats().slabs_closing, 0u);
}

// Every writer without room looks at a slab that is to be emptied. Its pages are many, half of them
// are leased, and the others leave in pieces: looking at all of them for each piece took seconds.
TEST(LargeSlabTest, EmptyingASlabOfManyPagesLooksAtEachOnce) {
  constexpr uint64_t kLarge = uint64_t{64} << 20;
  StoreOptions options = SmallStore("");
  options.host.bytes_max = ByteSize{2 * kLarge};
  options.host.slab_bytes = ByteSize{kLarge};
  FakeClock clock;
  const auto store = TieredStore::Open(options, clock, {}, {.slabs_of_tenants = true}).value();
  SampleFragment page = SamplePage(0, 0);
  page.range = {{0, 1}, {0, 1}};
  page.tile_bytes = 64;
  const auto store_one = [&](uint64_t tenant, uint64_t sequence) {
    page.keyspace = SampleKeyspace(tenant);
    page.key = SampleKey(sequence, 0);
    return Commit(*store, page);
  };
  for (const uint64_t tenant : {1, 2}) {
    ASSERT_TRUE(store->SetTenant(SampleKeyspace(tenant), std::to_string(tenant)).ok());
  }
  uint64_t pages = 0;
  while (store->Stats().host.evicted.capacity == 0) {
    for (int i = 0; i < 1'000; ++i) ASSERT_TRUE(store_one(1, pages++).ok());
  }
  EXPECT_GT(pages, 200'000u);
  AcquireRequest every_other = RequestOf(0, 1);
  every_other.keyspace = SampleKeyspace(1);
  every_other.range = page.range;
  for (uint64_t i = 1'000; i < pages; i += 2) {
    every_other.keys = {SampleKey(i, 0)};
    ASSERT_NE(Acquire(*store, every_other)->lease, 0u) << i;
  }
  const double before = ThreadCpuSeconds();
  EXPECT_TRUE(absl::IsResourceExhausted(store_one(2, 0).status()));
  EXPECT_LT(ThreadCpuSeconds() - before, 0.5);
  EXPECT_EQ(store->Stats().slabs_closing, 1u);
}

TEST_F(ManyTenantSlabsTest, SlabsAreLeftForTenantsWithoutAny) {
  LeaseAll();
  EXPECT_TRUE(Store(2, 0, 0).ok());
  EXPECT_TRUE(Store(3, 0, 0).ok());
  EXPECT_TRUE(absl::IsResourceExhausted(Store(4, 0, 0))) << "there are no more than these two";
}

TEST_F(ManyTenantSlabsTest, ASlabWhosePagesStayLeasedDoesNotHoldUpTheOthers) {
  LeaseAll();
  for (const uint64_t tenant : {2, 3}) ASSERT_TRUE(Store(tenant, 0, 0).ok());
  for (uint64_t closing = 1; closing <= 3; ++closing) {
    for (int i = 0; i < 3; ++i) EXPECT_TRUE(absl::IsResourceExhausted(Store(4, 0, 0)));
    EXPECT_EQ(store_->Stats().slabs_closing, closing);
    clock_.Advance(kLetGo);
  }
}

// The first tenant can keep a later one below its part for as long as it leases pages, and no
// longer.
TEST_F(ManyTenantSlabsTest, ALateTenantHasOneSlabUntilTheFirstReleasesItsPages) {
  constexpr uint64_t kPagesOfASlab = kSlabBytes / (18 << 10);
  LeaseAll();
  uint64_t stored = 0;
  const auto store_slab = [&] {
    for (uint64_t i = 0; i < kPagesOfASlab; ++i) EXPECT_TRUE(Store(2, stored++, 0).ok());
    clock_.Advance(kLetGo);
  };
  for (uint64_t slab = 0; slab < kMany; ++slab) store_slab();
  EXPECT_EQ(SlabsOf(2, stored).size(), 1u);
  for (const LeaseId lease : leases_) store_->Release(lease);
  for (uint64_t slab = 0; slab < 2 * kMany; ++slab) store_slab();
  EXPECT_GE(SlabsOf(2, stored).size(), kMany / 2);
}

TEST_F(TenantSlabsTest, EveryTenantGetsItsPartAndNoMore) {
  Fill(1);
  Fill(2);
  EXPECT_EQ(SlabsOf(1, kFilling).size(), kSlabs / 2);
  EXPECT_EQ(SlabsOf(2, kFilling).size(), kSlabs / 2);
  Fill(1);  // takes nothing back
  EXPECT_EQ(SlabsOf(2, kFilling).size(), kSlabs / 2);
  ASSERT_TRUE(Store(3, 0, 0).ok());
  ASSERT_TRUE(Store(4, 0, 0).ok());
  std::set<uint32_t> all;
  for (uint64_t tenant = 1; tenant <= 4; ++tenant) all.merge(SlabsOf(tenant, kFilling));
  EXPECT_EQ(all.size(), kSlabs);
}

TEST_F(TenantSlabsTest, MoreTenantsThanSlabsTakeTurns) {
  for (uint64_t tenant = 1; tenant <= kSlabs; ++tenant) {
    ASSERT_TRUE(Store(tenant, 0, 0).ok());
    clock_.Advance(std::chrono::seconds(1));
  }
  EXPECT_FALSE(Store(5, 0, 0).ok());  // all of them are new
  clock_.Advance(std::chrono::seconds(10));
  for (const uint64_t tenant : {1, 3, 4}) ASSERT_TRUE(Store(tenant, 1, 0).ok());
  EXPECT_TRUE(Store(5, 0, 0).ok());
  EXPECT_TRUE(SlabsOf(2, 1).empty());  // the longest without a request
  for (const uint64_t tenant : {1, 3, 4, 5}) EXPECT_FALSE(SlabsOf(tenant, 1).empty());
}

TEST_F(TenantSlabsTest, AKeyspaceOfAnotherTenantLeavesItsSlabs) {
  const uint64_t mark = store_->FlushMark(std::nullopt);
  ASSERT_TRUE(Store(1, 0, 0).ok());
  const auto leased = Lease(1, 0);
  ASSERT_TRUE(store_->SetTenant(SampleKeyspace(1), Name(2)).ok());
  EXPECT_EQ(FlushPages(*store_, mark).lost_pages, 1u) << "no SSD has the page";
  EXPECT_EQ(Lease(1, 0)->hit_pages, 0u);
  ASSERT_TRUE(Store(1, 0, 0).ok());
  ASSERT_TRUE(Store(2, 0, 0).ok());
  EXPECT_EQ(SlabsOf(1, 1), SlabsOf(2, 1));
  EXPECT_FALSE(SlabsOf(1, 1).contains(leased->fragments.at(0).slab));
  EXPECT_TRUE(store_->Release(leased->lease));
}

// Whatever tenants do, every leased page is right and lies in a slab that its tenant alone gets.
TEST_F(TenantSlabsTest, RandomUseKeepsTenantsApart) {
  std::mt19937_64 random(20261121);
  struct Held {
    uint64_t tenant;
    LeaseId lease;
    std::vector<FragmentRef> fragments;
  };
  std::vector<Held> held;
  std::array<uint64_t, 6> hits{};
  for (int step = 0; step < 20'000; ++step) {
    const uint64_t tenant = 1 + random() % 5;
    const uint64_t sequence = random() % (tenant * 40);
    clock_.Advance(std::chrono::milliseconds(random() % 20));
    if (random() % 2 == 0) {
      const absl::Status stored = Store(tenant, sequence, 0);
      ASSERT_TRUE(stored.ok() || absl::IsResourceExhausted(stored)) << stored;
    } else if (const auto leased = Lease(tenant, sequence); leased.ok() && leased->lease != 0) {
      ++hits[tenant];
      held.push_back({tenant, leased->lease, leased->fragments});
      for (const FragmentRef& fragment : leased->fragments) {
        ASSERT_TRUE(IsRight(store_->Bytes(fragment), SampleKeyspace(tenant), SampleKey(sequence, 0),
                            fragment.tiles_bytes));
        for (uint64_t other = 1; other <= 5; ++other) {
          ASSERT_EQ(store_->OpenSlab(fragment.slab, SampleKeyspace(other)).ok(), other == tenant);
        }
        for (const Held& lease : held) {
          for (const FragmentRef& there : lease.fragments) {
            ASSERT_TRUE(lease.tenant == tenant || there.slab != fragment.slab);
          }
        }
      }
    }
    while (held.size() > 20) {
      const size_t index = random() % held.size();
      ASSERT_TRUE(store_->Release(held[index].lease));
      held.erase(held.begin() + static_cast<std::ptrdiff_t>(index));
    }
  }
  for (uint64_t tenant = 1; tenant <= 5; ++tenant) EXPECT_GT(hits[tenant], 0u) << tenant;
  EXPECT_GT(store_->Stats().slab_moves, 10u);
}

}  // namespace
}  // namespace crumb::storage
