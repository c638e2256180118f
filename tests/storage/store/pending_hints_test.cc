// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "storage/store/pending_hints.h"

#include "gtest/gtest.h"
#include "tests/common/fake_clock.h"
#include "tests/storage/sample_fragment.h"
#include "tests/storage/store_calls.h"

namespace crumb::storage {
namespace {

TEST(PendingHints, EndByThemselves) {
  FakeClock clock;
  PendingHints hints(clock, std::chrono::seconds(10), 100);
  const PageKey key = SampleKey(1, 1);
  hints.Set(SampleKeyspace(0), "", std::span(&key, 1));
  EXPECT_TRUE(hints.Has(SampleKeyspace(0), key));
  EXPECT_FALSE(hints.Has(SampleKeyspace(1), key));
  clock.Advance(std::chrono::seconds(6));
  hints.Set(SampleKeyspace(0), "", std::span(&key, 1));  // again
  clock.Advance(std::chrono::seconds(6));
  EXPECT_TRUE(hints.Has(SampleKeyspace(0), key));
  clock.Advance(std::chrono::seconds(5));
  EXPECT_FALSE(hints.Has(SampleKeyspace(0), key));
}

TEST(PendingHints, TheOldestMakeRoom) {
  FakeClock clock;
  PendingHints hints(clock, std::chrono::seconds(10), 3);
  for (uint64_t i = 0; i < 5; ++i) {
    const PageKey key = SampleKey(1, i);
    hints.Set(SampleKeyspace(0), "", std::span(&key, 1));
  }
  EXPECT_FALSE(hints.Has(SampleKeyspace(0), SampleKey(1, 1)));
  EXPECT_TRUE(hints.Has(SampleKeyspace(0), SampleKey(1, 2)));
  EXPECT_TRUE(hints.Has(SampleKeyspace(0), SampleKey(1, 4)));
  EXPECT_EQ(hints.forgotten(), 2u);
}

// A hint that was renewed is not forgotten with its older self, and one that ends in its time does
// not count as forgotten.
TEST(PendingHints, OnlyHintsThatEndEarlyAreForgotten) {
  FakeClock clock;
  PendingHints hints(clock, std::chrono::seconds(10), 3);
  const PageKey renewed = SampleKey(1, 0);
  hints.Set(SampleKeyspace(0), "", std::span(&renewed, 1));
  clock.Advance(std::chrono::seconds(1));
  for (uint64_t i = 0; i < 3; ++i) {
    const PageKey key = SampleKey(1, i);
    hints.Set(SampleKeyspace(0), "", std::span(&key, 1));
  }
  EXPECT_TRUE(hints.Has(SampleKeyspace(0), renewed));
  clock.Advance(std::chrono::seconds(10));
  const PageKey last = SampleKey(2, 0);
  hints.Set(SampleKeyspace(0), "", std::span(&last, 1));
  EXPECT_EQ(hints.forgotten(), 0u);
}

// Many tenants have one page each: their hints leave in order of age, and the excess goes evenly.
TEST(PendingHints, ManyTenantsLoseAlike) {
  constexpr uint64_t kTenants = 1000;
  FakeClock clock;
  PendingHints hints(clock, std::chrono::seconds(10), kTenants);
  const auto announce = [&](uint64_t tenant, uint64_t page) {
    const PageKey key = SampleKey(tenant, page);
    hints.Set(SampleKeyspace(tenant), std::to_string(tenant), std::span(&key, 1));
  };
  const auto has = [&](uint64_t tenant, uint64_t page) {
    return hints.Has(SampleKeyspace(tenant), SampleKey(tenant, page));
  };
  for (uint64_t tenant = 0; tenant < kTenants; ++tenant) announce(tenant, 0);
  for (uint64_t tenant = 0; tenant < kTenants; ++tenant) EXPECT_TRUE(has(tenant, 0)) << tenant;
  clock.Advance(std::chrono::seconds(9));
  // A second page of a tenant takes the place of its first.
  for (uint64_t tenant = 0; tenant < kTenants / 2; ++tenant) announce(tenant, 1);
  EXPECT_EQ(hints.forgotten(), kTenants / 2);
  for (uint64_t tenant = 0; tenant < kTenants; ++tenant) {
    EXPECT_EQ(has(tenant, 0), tenant >= kTenants / 2) << tenant;
  }
  clock.Advance(std::chrono::seconds(1));
  announce(0, 2);  // room for it comes from hints that are over
  EXPECT_EQ(hints.forgotten(), kTenants / 2);
  EXPECT_TRUE(has(0, 1));
  EXPECT_FALSE(has(kTenants - 1, 0));
}

TEST(PendingHints, ABoundOfOneHint) {
  FakeClock clock;
  PendingHints hints(clock, std::chrono::seconds(10), 1);
  for (uint64_t tenant = 0; tenant < 10; ++tenant) {
    const PageKey key = SampleKey(1, tenant);
    hints.Set(SampleKeyspace(0), std::to_string(tenant), std::span(&key, 1));
  }
  EXPECT_EQ(hints.forgotten(), 9u);
}

TEST(PendingHints, ATenantWithManyLosesItsOwn) {
  FakeClock clock;
  PendingHints hints(clock, std::chrono::seconds(10), 1000);
  const PageKey other = SampleKey(9, 0);
  hints.Set(SampleKeyspace(1), "other", std::span(&other, 1));
  std::vector<PageKey> keys;
  for (uint64_t i = 0; i < 5000; ++i) keys.push_back(SampleKey(1, i));
  hints.Set(SampleKeyspace(0), "many", keys);
  EXPECT_TRUE(hints.Has(SampleKeyspace(1), other));
  EXPECT_TRUE(hints.Has(SampleKeyspace(0), keys.back()));
  EXPECT_TRUE(hints.Has(SampleKeyspace(0), keys[4001]));
  EXPECT_FALSE(hints.Has(SampleKeyspace(0), keys[4000]));

  // Hints of a tenant that sent none since make room, once they are over.
  clock.Advance(std::chrono::seconds(10));
  hints.Set(SampleKeyspace(1), "other", std::span(keys).first(1000));
  EXPECT_TRUE(hints.Has(SampleKeyspace(1), keys[0]));
}

TEST(PendingHints, TheStoreCountsThoseThatItForgot) {
  StoreOptions options = SmallStore("");
  options.pending_pages_max = 2;
  const auto store = TieredStore::Open(options, Clock::Real(), {});
  ASSERT_TRUE(store.ok()) << store.status();
  const AcquireRequest request = RequestOf(1, 5);
  (*store)->SetPending(request.keyspace, "", request.keys);
  EXPECT_EQ((*store)->Stats().pending_forgotten, 3u);
}

}  // namespace
}  // namespace crumb::storage
