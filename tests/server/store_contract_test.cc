// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
// The promises of TieredStore that callers rely on, kept by the real store and by the fake that the
// server's tests use instead of it.
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "storage/store/open_tiered_store.h"
#include "tests/common/temporary_folder.h"
#include "tests/server/memory_store.h"
#include "tests/storage/store_calls.h"

namespace crumb::server {
namespace {

using storage::AcquireRequest;
using storage::RequestOf;
using storage::SampleKey;
using storage::SampleKeyspace;
using storage::SamplePage;

struct Implementation {
  const char* name;
  std::function<std::unique_ptr<storage::TieredStore>(const std::string& folder,
                                                      storage::StoreEvents events)>
      open;
};

const Implementation kImplementations[] = {
    {"host",
     [](const std::string&, storage::StoreEvents events) {
       storage::StoreOptions options = storage::SmallStore("");
       options.host.bytes_max = ByteSize{uint64_t{2} << 20};
       return storage::TieredStore::Open(options, Clock::Real(), std::move(events)).value();
     }},
    {"host_and_ssd",
     [](const std::string& folder, storage::StoreEvents events) {
       storage::StoreOptions options = storage::SmallStore(folder);
       options.host.bytes_max = ByteSize{uint64_t{2} << 20};
       return storage::TieredStore::Open(options, Clock::Real(), std::move(events)).value();
     }},
    {"memory_fake",
     [](const std::string&, storage::StoreEvents events) -> std::unique_ptr<storage::TieredStore> {
       return std::make_unique<MemoryStore>(64, 64 << 10, std::move(events));
     }}};

class StoreContractTest : public testing::TestWithParam<Implementation> {
 protected:
  StoreContractTest() { Open({}); }

  void Open(storage::StoreEvents events) {
    store_.reset();
    store_ = GetParam().open(folder_.path(), std::move(events));
  }
  void CommitPages(uint64_t sequence, uint64_t pages) {
    for (uint64_t i = 0; i < pages; ++i) {
      const auto outcome = storage::Commit(*store_, SamplePage(sequence, i));
      ASSERT_TRUE(outcome.ok()) << outcome.status();
      ASSERT_EQ(*outcome, CommitOutcome::kStored);
    }
  }

  TemporaryFolder folder_;
  std::unique_ptr<storage::TieredStore> store_;
};

TEST_P(StoreContractTest, CommittedPagesAreHitsAtOnce) {
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
  EXPECT_EQ(store_->Stats().host.pages, 5u);
}

TEST_P(StoreContractTest, AnAcquireWithoutAHitTakesNoLease) {
  const auto result = Acquire(*store_, RequestOf(1, 3));
  ASSERT_TRUE(result.ok());
  EXPECT_EQ(result->hit_pages, 0u);
  EXPECT_EQ(result->lease, 0u);
  EXPECT_EQ(store_->Stats().leases, 0u);
}

TEST_P(StoreContractTest, ALeaseEndsOnce) {
  CommitPages(1, 2);
  const AcquireRequest request = RequestOf(1, 2);
  const auto result = Acquire(*store_, request);
  ASSERT_TRUE(result.ok());
  const auto read = store_->ReadLease(result->lease, request.range);
  ASSERT_TRUE(read.has_value());
  EXPECT_EQ(read->pages, 2u);
  EXPECT_TRUE(store_->Release(result->lease));
  EXPECT_FALSE(store_->Release(result->lease));
  EXPECT_FALSE(store_->ReadLease(result->lease, request.range).has_value());
  EXPECT_EQ(store_->Stats().leases, 0u);
}

TEST_P(StoreContractTest, TheFirstCommitWins) {
  CommitPages(1, 1);
  EXPECT_EQ(*storage::Commit(*store_, SamplePage(1, 0)), CommitOutcome::kDeduplicated);
  EXPECT_EQ(store_->Stats().host.pages, 1u);
}

TEST_P(StoreContractTest, KeyspacesShareNoPage) {
  CommitPages(1, 1);
  AcquireRequest other = RequestOf(1, 1);
  other.keyspace = SampleKeyspace(1);
  EXPECT_EQ(Acquire(*store_, other)->miss_reason, MissReason::kAbsent);
  storage::SampleFragment page = SamplePage(1, 0);
  page.keyspace = other.keyspace;
  EXPECT_EQ(*storage::Commit(*store_, page), CommitOutcome::kStored);
  for (const AcquireRequest& request : {RequestOf(1, 1), other}) {
    const auto result = Acquire(*store_, request);
    ASSERT_EQ(result->hit_pages, 1u);
    EXPECT_TRUE(AllRight(*store_, request, *result));
  }
  EXPECT_EQ(store_->Delete(other.keyspace, other.keys).value(), 1u);
  EXPECT_EQ(Acquire(*store_, RequestOf(1, 1))->hit_pages, 1u);
}

TEST_P(StoreContractTest, DamagedCommitsBecomeNoPage) {
  std::vector<std::byte> bytes = BytesOf(SamplePage(1, 0));
  bytes[100] ^= std::byte{1};
  EXPECT_TRUE(absl::IsDataLoss(store_->Commit(CommitOf(SamplePage(1, 0), bytes)).status()));
  EXPECT_EQ(Acquire(*store_, RequestOf(1, 1))->hit_pages, 0u);
}

TEST_P(StoreContractTest, AGenerationServesReadersOfItAndOfOlderOnes) {
  storage::SampleFragment page = SamplePage(1, 0);
  page.generation = 2;
  ASSERT_TRUE(storage::Commit(*store_, page).ok());
  AcquireRequest request = RequestOf(1, 1);
  for (const uint64_t generation : {1, 2}) {
    request.generation = generation;
    EXPECT_EQ(Acquire(*store_, request)->hit_pages, 1u) << generation;
  }
  request.generation = 3;
  const auto result = Acquire(*store_, request);
  EXPECT_EQ(result->hit_pages, 0u);
  EXPECT_EQ(result->miss_reason, MissReason::kGeneration);
}

TEST_P(StoreContractTest, DroppedGenerationsAreMissesForGood) {
  CommitPages(1, 10);
  EXPECT_EQ(store_->DropKeyspace(SampleKeyspace(0), 2).value(), 10u);
  EXPECT_EQ(Acquire(*store_, RequestOf(1, 1))->hit_pages, 0u);
  EXPECT_TRUE(absl::IsInvalidArgument(storage::Commit(*store_, SamplePage(1, 0)).status()));
  storage::SampleFragment newer = SamplePage(1, 0);
  newer.generation = 2;
  EXPECT_TRUE(storage::Commit(*store_, newer).ok());
}

TEST_P(StoreContractTest, DeletedPagesAreMissesAndCountOnce) {
  CommitPages(1, 3);
  const std::vector<PageKey> keys = RequestOf(1, 4).keys;
  EXPECT_EQ(store_->Delete(SampleKeyspace(0), std::span(keys).subspan(1)).value(), 2u);
  EXPECT_EQ(store_->Delete(SampleKeyspace(0), std::span(keys).subspan(1)).value(), 0u);
  const auto result = Acquire(*store_, RequestOf(1, 3));
  EXPECT_EQ(result->hit_pages, 1u);
  EXPECT_EQ(result->miss_reason, MissReason::kAbsent);
  EXPECT_EQ(*storage::Commit(*store_, SamplePage(1, 1)), CommitOutcome::kStored);
  EXPECT_EQ(Acquire(*store_, RequestOf(1, 3))->hit_pages, 2u);
}

TEST_P(StoreContractTest, ALeaseKeepsItsBytesWhenPagesAreDeleted) {
  CommitPages(1, 4);
  const AcquireRequest request = RequestOf(1, 4);
  const auto lease = Acquire(*store_, request);
  ASSERT_EQ(lease->hit_pages, 4u);
  ASSERT_TRUE(store_->Delete(request.keyspace, request.keys).ok());
  CommitPages(2, 20);
  EXPECT_TRUE(AllRight(*store_, request, *lease));
  EXPECT_EQ(lease->fragments.size(), 4u);
  for (const storage::FragmentRef& fragment : lease->fragments) {
    EXPECT_FALSE(store_->Bytes(fragment).empty());
  }
  EXPECT_TRUE(store_->Release(lease->lease));
}

TEST_P(StoreContractTest, AStoreFullOfLeasesRefuses) {
  absl::StatusOr<CommitOutcome> outcome = CommitOutcome::kStored;
  for (uint64_t i = 0; i < 1000; ++i) {
    outcome = storage::Commit(*store_, SamplePage(i, 0));
    if (!outcome.ok()) break;
    EXPECT_EQ(Acquire(*store_, RequestOf(i, 1))->hit_pages, 1u);
  }
  EXPECT_TRUE(absl::IsResourceExhausted(outcome.status())) << outcome.status();
}

TEST_P(StoreContractTest, ALookupLeasesNothing) {
  CommitPages(1, 3);
  const storage::LookupResult result = store_->Lookup(RequestOf(1, 5));
  EXPECT_EQ(result.hit_pages, 3u);
  EXPECT_THAT(result.page_tiers, testing::Each(Tier::kHost));
  EXPECT_EQ(result.miss_reason, MissReason::kAbsent);
  EXPECT_EQ(store_->Stats().leases, 0u);
}

TEST_P(StoreContractTest, EventsNamePagesThatCameAndWent) {
  std::set<PageKey> there;
  storage::StoreEvents events;
  events.page = [&](const storage::PageEvent& event) {
    if (event.tier != Tier::kHost) return;
    if (event.kind == storage::PageEvent::Kind::kAdded) {
      there.insert(event.key);
    } else {
      there.erase(event.key);
    }
  };
  Open(events);
  CommitPages(1, 3);
  EXPECT_THAT(there,
              testing::UnorderedElementsAre(SampleKey(1, 0), SampleKey(1, 1), SampleKey(1, 2)));
  const PageKey key = SampleKey(1, 2);
  ASSERT_TRUE(store_->Delete(SampleKeyspace(0), std::span(&key, 1)).ok());
  EXPECT_THAT(there, testing::UnorderedElementsAre(SampleKey(1, 0), SampleKey(1, 1)));
  ASSERT_TRUE(store_->DropKeyspace(SampleKeyspace(0), 2).ok());
  EXPECT_THAT(there, testing::IsEmpty());
  store_.reset();
}

TEST_P(StoreContractTest, PagesNameTheirParents) {
  CommitPages(1, 2);
  EXPECT_EQ(store_->ParentOf(SampleKeyspace(0), SampleKey(1, 0)), PageKey());
  EXPECT_EQ(store_->ParentOf(SampleKeyspace(0), SampleKey(1, 1)), SampleKey(1, 0));
  EXPECT_EQ(store_->ParentOf(SampleKeyspace(0), SampleKey(2, 0)), std::nullopt);
  EXPECT_EQ(store_->ParentOf(SampleKeyspace(1), SampleKey(1, 1)), std::nullopt);
}

INSTANTIATE_TEST_SUITE_P(Stores, StoreContractTest, testing::ValuesIn(kImplementations),
                         [](const auto& tested) { return std::string(tested.param.name); });

}  // namespace
}  // namespace crumb::server
