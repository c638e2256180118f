// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <sys/stat.h>

#include <algorithm>
#include <map>
#include <memory>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "common/mapping.h"
#include "gtest/gtest.h"
#include "storage/host_image.h"
#include "storage/tiered_store.h"
#include "tests/common/fake_clock.h"
#include "tests/storage/store_calls.h"

namespace crumb::storage {

inline constexpr uint64_t kSlabBytes = uint64_t{1} << 20;
inline constexpr uint64_t kSlabs = 4;
inline constexpr Duration kLetGo = std::chrono::seconds(10);
inline constexpr uint64_t kFilling = 2 * kSlabs * kSlabBytes / (18 << 10);

class TenantSlabsTest : public testing::Test {
 protected:
  explicit TenantSlabsTest(uint64_t slabs = kSlabs) : slabs_(slabs) { Open(nullptr); }

  void Open(std::unique_ptr<HandedOverMemory> handed_over) {
    StoreOptions options = SmallStore("");
    options.host.bytes_max = ByteSize{slabs_ * kSlabBytes};
    options.host.slab_bytes = ByteSize{kSlabBytes};
    StoreEvents events;
    events.slab_gone = [this](uint32_t slab) { gone_.insert(slab); };
    options.host.let_go_timeout = kLetGo;
    options.host.revoked_slabs_max = 3;
    options.host.revoked_slabs_per_tenant = 2;
    StoreStart start;
    start.slabs_of_tenants = true;
    start.free_memory = [this] { return free_bytes_; };
    start.handed_over = std::move(handed_over);
    store_ = TieredStore::Open(options, clock_, std::move(events), std::move(start)).value();
    for (uint64_t tenant = 1; tenant <= 5; ++tenant) {
      EXPECT_TRUE(store_->SetTenant(SampleKeyspace(tenant), Name(tenant)).ok());
    }
  }

  static std::string Name(uint64_t tenant) { return "tenant " + std::to_string(tenant); }
  static SampleFragment Page(uint64_t tenant, uint64_t sequence, uint64_t number) {
    SampleFragment page = SamplePage(sequence, number);
    page.keyspace = SampleKeyspace(tenant);
    return page;
  }
  absl::Status Store(uint64_t tenant, uint64_t sequence, uint64_t number) {
    return Commit(*store_, Page(tenant, sequence, number)).status();
  }
  // Commits pages of sequences of one page, twice as many as there is room for.
  void Fill(uint64_t tenant) {
    const uint64_t evicted = store_->Stats().host.evicted.capacity;
    for (uint64_t i = 0; i < kFilling; ++i) ASSERT_TRUE(Store(tenant, i, 0).ok()) << i;
    EXPECT_GT(store_->Stats().host.evicted.capacity, evicted);
    gone_.clear();
  }
  absl::StatusOr<AcquireResult> Lease(uint64_t tenant, uint64_t sequence, uint64_t pages = 1) {
    AcquireRequest request = RequestOf(sequence, pages);
    request.keyspace = SampleKeyspace(tenant);
    return Acquire(*store_, request);
  }
  // The slabs that pages of the tenant lie in, of sequences below `sequences`.
  std::set<uint32_t> SlabsOf(uint64_t tenant, uint64_t sequences) {
    std::set<uint32_t> slabs;
    for (uint64_t i = 0; i < sequences; ++i) {
      const auto leased = Lease(tenant, i);
      if (!leased.ok() || leased->lease == 0) continue;
      for (const FragmentRef& fragment : leased->fragments) slabs.insert(fragment.slab);
      store_->Release(leased->lease);
    }
    return slabs;
  }
  Mapping Map(uint64_t tenant, uint32_t slab) {
    const UniqueFd fd = store_->OpenSlab(slab, SampleKeyspace(tenant)).value();
    return Mapping::Of(fd.get(), kSlabBytes, Mapping::Access::kReadOnly).value();
  }

  // Maps every slab of the tenant's pages.
  std::map<uint32_t, Mapping> MapAll(uint64_t tenant) {
    std::map<uint32_t, Mapping> mapped;
    for (const uint32_t slab : SlabsOf(tenant, kFilling)) mapped.emplace(slab, Map(tenant, slab));
    return mapped;
  }

  using Files = std::map<ino_t, UniqueFd>;
  // Opens the file of every slab of the tenant's pages.
  Files OpenAll(uint64_t tenant) {
    Files files;
    for (const uint32_t slab : SlabsOf(tenant, kFilling)) {
      UniqueFd fd = store_->OpenSlab(slab, SampleKeyspace(tenant)).value();
      struct stat status = {};
      EXPECT_EQ(::fstat(fd.get(), &status), 0);
      files.emplace(status.st_ino, std::move(fd));
    }
    return files;
  }
  static uint64_t CountMissing(const Files& files, const Files& from) {
    return static_cast<uint64_t>(std::count_if(
        files.begin(), files.end(), [&](const auto& file) { return !from.contains(file.first); }));
  }
  // Another process takes the store's memory over.
  void TakeOver() {
    EXPECT_TRUE(store_->Stop(Duration::zero()).ok());
    auto memory = store_->HandOver();
    ASSERT_TRUE(memory.ok()) << memory.status();
    const std::string image = EncodeHostImage(memory->image);
    memory->image = DecodeHostImage(std::as_bytes(std::span(image))).value();
    store_.reset();
    Open(std::make_unique<HandedOverMemory>(*std::move(memory)));
  }
  // Takes all memory that the store may have now, and moves pages there.
  void GrowAll(int steps = 20) {
    for (int i = 0; i < steps; ++i) {
      ASSERT_TRUE(store_->GrowHost(slabs_ * kSlabBytes).ok());
      clock_.Advance(std::chrono::seconds(1));
    }
  }

  const uint64_t slabs_;
  FakeClock clock_;
  uint64_t free_bytes_ = UINT64_MAX / 2;
  std::set<uint32_t> gone_;
  std::unique_ptr<TieredStore> store_;
};

class ManyTenantSlabsTest : public TenantSlabsTest {
 protected:
  static constexpr uint64_t kMany = 16;
  ManyTenantSlabsTest() : TenantSlabsTest(kMany) {
    for (uint64_t i = 0; i < kFilling * kMany / kSlabs; ++i) EXPECT_TRUE(Store(1, i, 0).ok());
  }
  // Leases every page of the first tenant, and so a page in each of its slabs.
  void LeaseAll() {
    std::set<uint32_t> slabs;
    for (uint64_t i = 0; i < kFilling * kMany / kSlabs; ++i) {
      const auto leased = Lease(1, i);
      if (!leased.ok()) continue;
      for (const FragmentRef& fragment : leased->fragments) slabs.insert(fragment.slab);
      if (leased->lease != 0) leases_.push_back(leased->lease);
    }
    EXPECT_EQ(slabs.size(), kMany - kMany / 8);
  }

  std::vector<LeaseId> leases_;
};

}  // namespace crumb::storage
