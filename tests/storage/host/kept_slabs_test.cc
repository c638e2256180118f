// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
// Slabs whose memory processes of a tenant keep, over takeovers or by pinned pages.
#include <fcntl.h>
#include <unistd.h>

#include <array>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "tests/storage/host/tenant_slabs_fixture.h"

namespace crumb::storage {
namespace {

// A successor takes slabs that were given up over with the others, and counts them.
TEST_F(TenantSlabsTest, RevokedSlabsCountInASuccessor) {
  Fill(1);
  const auto mapped = MapAll(1);
  ASSERT_EQ(mapped.size(), kSlabs);
  EXPECT_TRUE(absl::IsResourceExhausted(Store(2, 0, 0)));
  clock_.Advance(kLetGo);
  ASSERT_TRUE(Store(2, 0, 0).ok());
  ASSERT_EQ(store_->Stats().slabs_revoked, 1u);
  // The next slab is given up, and kept.
  for (uint64_t i = 1; i < kFilling; ++i) Store(2, i, 0).IgnoreError();
  ASSERT_EQ(store_->Stats().slabs_gone, 1u);
  TakeOver();
  EXPECT_EQ(store_->Stats().slabs_revoked, 1u);
  EXPECT_EQ(store_->Stats().slabs_kept, 1u);
  const std::map<std::string, uint64_t> revoked = {{Name(1), 1}};
  EXPECT_EQ(store_->HandOver()->image.revoked, revoked);
}

// A tenant keeps every slab over many takeovers. Its slabs and crumbd's own memory are bounded
// together, other tenants continue, and all memory is there again after it unmaps them.
TEST_F(TenantSlabsTest, KeptSlabsAreBoundedOverTakeovers) {
  Files kept;
  for (int takeover = 0; takeover < 6; ++takeover) {
    for (uint64_t i = 0; i < kFilling; ++i) Store(1, i, 0).IgnoreError();
    kept.merge(OpenAll(1));
    TakeOver();
    GrowAll();
    const uint64_t slabs = store_->Stats().host.capacity_bytes / kSlabBytes;
    EXPECT_GE(slabs, 1u);
    const uint64_t kept_only = CountMissing(kept, OpenAll(1));
    EXPECT_LE(slabs + kept_only, kSlabs + 1 + store_->Stats().slabs_revoked)
        << "after takeover " << takeover;
    bool stored = false;
    for (int round = 0; round < 10 && !stored; ++round) {
      stored = Store(2, 0, 0).ok();
      clock_.Advance(kLetGo);
    }
    EXPECT_TRUE(stored) << "after takeover " << takeover;
  }
  EXPECT_LE(store_->Stats().slabs_revoked, 2u);
  EXPECT_EQ(kept.size(), kSlabs);
  kept.clear();
  GrowAll();
  EXPECT_EQ(store_->Stats().host.capacity_bytes, kSlabs * kSlabBytes);
  EXPECT_EQ(store_->Stats().slabs_kept, 0u);
}

TEST_F(TenantSlabsTest, ASlabThatWasTakenOverIsKeptWhileAPageOfItIsPinned) {
  ASSERT_TRUE(Store(1, 0, 0).ok());
  std::array<int, 2> ends{};
  ASSERT_EQ(::pipe(ends.data()), 0);
  const UniqueFd from(ends[0]);
  const UniqueFd to(ends[1]);
  std::array<char, 4096> page{};
  {
    const UniqueFd slab = store_->OpenSlab(*SlabsOf(1, 1).begin(), SampleKeyspace(1)).value();
    ASSERT_EQ(::splice(slab.get(), nullptr, to.get(), nullptr, page.size(), 0), page.size());
  }
  TakeOver();
  GrowAll(/*steps=*/3);
  EXPECT_EQ(store_->Stats().slabs_kept, 1u);
  ASSERT_EQ(::read(from.get(), page.data(), page.size()), page.size());
  GrowAll();
  EXPECT_EQ(store_->Stats().slabs_kept, 0u);
}

// A slab whose pages stay pinned does not keep the memory of others from coming back.
TEST_F(TenantSlabsTest, EachKeptSlabIsLookedAtInItsTurn) {
  Fill(1);
  std::vector<std::pair<UniqueFd, UniqueFd>> pipes;
  for (const uint32_t number : SlabsOf(1, kFilling)) {
    std::array<int, 2> ends{};
    ASSERT_EQ(::pipe(ends.data()), 0);
    pipes.emplace_back(ends[0], ends[1]);
    const UniqueFd slab = store_->OpenSlab(number, SampleKeyspace(1)).value();
    ASSERT_EQ(::splice(slab.get(), nullptr, ends[1], nullptr, 4096, 0), 4096);
  }
  TakeOver();
  GrowAll();
  ASSERT_GE(store_->Stats().slabs_kept, 2u);
  pipes.erase(pipes.begin() + 1, pipes.end());
  GrowAll(/*steps=*/40);
  EXPECT_LE(store_->Stats().slabs_kept, 1u);
}

// The kernel takes up to 200 ms to find out that a page is pinned, on the thread of a writer: a
// tenant that pins pages of its slabs must not hold up the others.
TEST_F(ManyTenantSlabsTest, PinnedSlabsAreLookedAtSeldom) {
  std::vector<UniqueFd> pipes;
  for (const uint32_t number : SlabsOf(1, kFilling * kMany / kSlabs)) {
    std::array<int, 2> ends{};
    ASSERT_EQ(::pipe(ends.data()), 0);
    pipes.emplace_back(ends[0]);
    pipes.emplace_back(ends[1]);
    const UniqueFd slab = store_->OpenSlab(number, SampleKeyspace(1)).value();
    ASSERT_EQ(::splice(slab.get(), nullptr, ends[1], nullptr, 4096, 0), 4096);
  }
  uint64_t stored = 0;
  const auto store_for = [&](Duration time) {
    for (const TimePoint end = clock_.Now() + time; clock_.Now() < end;
         clock_.Advance(std::chrono::milliseconds(100))) {
      Store(2, stored++, 0).IgnoreError();
    }
  };
  store_for(5 * kLetGo);
  const StoreStats before = store_->Stats();
  EXPECT_GE(before.slabs_gone, 2u);
  store_for(kLetGo);
  // Each slab is looked at when it is given up, and one of those that are known every 4 s.
  const uint64_t given_up = store_->Stats().slabs_gone - before.slabs_gone;
  EXPECT_LE(store_->Stats().slab_pinned_checks - before.slab_pinned_checks, given_up + 3);
  EXPECT_GE(store_->Stats().slab_pinned_checks - before.slab_pinned_checks, 1u);
  pipes.clear();
  clock_.Advance(kLetGo);
  EXPECT_TRUE(Store(3, 0, 0).ok()) << "they are of use again";
}

}  // namespace
}  // namespace crumb::storage
