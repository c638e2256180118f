// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
// The worst request of each call on pages, at its size limit, over a real store, with Lookups
// beside it. No request may hold another up by 50 ms, or occupy its own thread for a second. Calls
// of sessions and pools are in worst_session_requests_test.cc.
#include <string>
#include <vector>

#include "server/calls/get_reader.h"
#include "server/calls/keyspace_calls.h"
#include "server/calls/page_calls.h"
#include "server/calls/staging_calls.h"
#include "server/calls/status_calls.h"
#include "tests/server/calls/worst_requests_fixture.h"

namespace crumb::server {
namespace {

// A page with the maximum number of fragments, named as often as fits into a request.
TEST_F(WorstRequestsTest, AcquireOfOnePageOfManyFragmentsManyTimes) {
  constexpr int kPages = 8;
  size_t fragments = 0;
  for (int page = 0; page < kPages; ++page) {
    for (uint16_t layer = 0; layer < 32; ++layer) {
      for (uint16_t head = 0; head < 32; ++head) {
        const TileRange tile = {{layer, static_cast<uint16_t>(layer + 1)},
                                {head, static_cast<uint16_t>(head + 1)}};
        if (StorePage(FamilyKey(1, page), PageKey(), tile).ok()) ++fragments;
      }
    }
  }
  EXPECT_EQ(fragments, kPages * static_cast<size_t>(HostOnly().page_fragments_max));
  v1::AcquireRequest request;
  request.set_keyspace(std::string(keyspace_->id.view()));
  std::string keys;
  for (int i = 0; i < kKeysMax; ++i) keys += FamilyKey(1, i % kPages).view();
  request.set_keys(keys);
  size_t reply_bytes = 0;
  ExpectHarmless([&] {
    v1::AcquireResponse response;
    if (AcquireOnce(request, &response).ok()) GiveBack(response.lease());
    reply_bytes = std::max(reply_bytes, response.ByteSizeLong());
  });
  EXPECT_LT(reply_bytes, size_t{8} << 20);
}

// A page that comes at the end of a long chain, while many pages wait for it.
TEST_F(WorstRequestsTest, PutOfAPageThatManyPagesWaitFor) {
  constexpr int kPages = 6000;
  StoreChain(1, kPages);
  const PageKey meeting = FamilyKey(2, 0);
  for (int i = 0; i < kPages; ++i) {
    ASSERT_TRUE(StorePage(FamilyKey(3, i), meeting, {{0, 1}, {0, 1}}).ok());
  }
  ExpectHarmless(
      [&] {
        EXPECT_TRUE(StorePage(meeting, FamilyKey(1, kPages - 1), {{0, 1}, {0, 1}}).ok());
      },
      [&] { EXPECT_TRUE(store_->Delete(keyspace_->id, std::span(&meeting, 1)).ok()); });
}

// A request of just less than the 4 MiB that gRPC takes.
TEST_F(WorstRequestsTest, ReleaseOfAsManyRequestsAsAMessageHolds) {
  v1::ReleaseRequest request;
  for (uint64_t i = 0; i < 780'000; ++i) request.add_requests((uint64_t{1} << 33) + i);
  ASSERT_LT(request.ByteSizeLong(), size_t{4} << 20);
  ExpectHarmless([&] {
    v1::ReleaseResponse response;
    EXPECT_EQ(Release(context_, *session_, request, &response).code(),
              absl::StatusCode::kInvalidArgument);
  });
  request.mutable_requests()->Truncate(4096);
  for (uint64_t i = 0; i < 16'384; ++i) request.add_leases(i);
  ExpectHarmless([&] {
    v1::ReleaseResponse response;
    EXPECT_TRUE(Release(context_, *session_, request, &response).ok());
  });
}

// Pieces of 512 bytes of which every other one is free, in front of free memory: none of the free
// pieces fits.
TEST_F(WorstRequestsTest, ReserveInFragmentedStagingMemory) {
  constexpr uint64_t kArea = uint64_t{64} << 20;
  const auto session = sessions_.Open({"test", "", 0, kArea, ""}).value();
  const auto reserve = [&](uint32_t count, uint64_t bytes) {
    v1::ReserveRequest request;
    request.set_count(count);
    request.set_fragment_bytes(bytes);
    v1::ReserveResponse response;
    EXPECT_TRUE(Reserve(context_, *session, request, &response).ok());
    EXPECT_EQ(response.offsets_size(), static_cast<int>(count));
    return response;
  };
  const auto abort = [&](const std::vector<uint64_t>& offsets) {
    v1::AbortRequest request;
    request.mutable_offsets()->Add(offsets.begin(), offsets.end());
    EXPECT_TRUE(Abort(context_, *session, request).ok());
  };
  const auto count = static_cast<uint32_t>(limits_.commit_fragments_max);
  std::vector<std::vector<uint64_t>> every_other(14);
  for (std::vector<uint64_t>& offsets : every_other) {
    const v1::ReserveResponse reserved = reserve(count, 512);
    for (int i = 0; i < reserved.offsets_size(); i += 2) offsets.push_back(reserved.offsets(i));
  }
  for (const std::vector<uint64_t>& offsets : every_other) abort(offsets);
  v1::ReserveResponse reserved;
  const auto give_back = [&] {
    if (reserved.offsets_size() > 0) abort({reserved.offsets().begin(), reserved.offsets().end()});
    reserved.Clear();
  };
  ExpectHarmless([&] { reserved = reserve(count, 1024); }, give_back, /*call_seconds_max=*/0.1);
}

// Every call on as many pages as it may name, all of which are there.
TEST_F(WorstRequestsTest, CallsOnAsManyPagesAsTheyMayName) {
  StoreChain(1, kKeysMax);
  const std::string keys = FamilyKeys(1, kKeysMax);
  {
    SCOPED_TRACE("Acquire and Release");
    const auto request = Made<v1::AcquireRequest>(keys);
    v1::AcquireResponse response;
    ExpectHarmless([&] {
      response.Clear();
      ASSERT_TRUE(AcquireOnce(request, &response).ok());
      ASSERT_EQ(response.hit_pages(), static_cast<uint32_t>(kKeysMax));
      GiveBack(response.lease());
    });
  }
  {
    SCOPED_TRACE("Lookup");
    const auto request = Made<v1::LookupRequest>(keys);
    ExpectHarmless([&] {
      v1::LookupResponse response;
      Completion completion;
      Lookup(context_, TimePoint::max(), request, &response, completion.done());
      EXPECT_EQ(response.hit_pages(), static_cast<uint32_t>(kKeysMax));
    });
  }
  {
    SCOPED_TRACE("Get");
    const auto request = Made<v1::GetRequest>(keys);
    ExpectHarmless([&] {
      GetReader::Open(context_, request, TimePoint::max(),
                      [](const auto& reader) { EXPECT_TRUE(reader.ok()); });
    });
  }
  {
    SCOPED_TRACE("Prefetch");
    const auto request = Made<v1::PrefetchRequest>(keys);
    ExpectHarmless([&] {
      v1::PrefetchResponse response;
      EXPECT_TRUE(Prefetch(context_, request, &response).ok());
    });
  }
  {
    SCOPED_TRACE("Pin");
    auto request = Made<v1::PinRequest>(keys);
    request.set_ttl_ms(1);
    ExpectHarmless([&] {
      v1::PinResponse response;
      Completion completion;
      Pin(context_, TimePoint::max(), request, &response, completion.done());
      EXPECT_EQ(response.pinned_pages(), static_cast<uint32_t>(kKeysMax));
    });
  }
  {
    SCOPED_TRACE("Unpin");
    const auto request = Made<v1::UnpinRequest>(keys);
    ExpectHarmless([&] {
      v1::UnpinResponse response;
      EXPECT_TRUE(Unpin(context_, request, &response).ok());
    });
  }
  {
    SCOPED_TRACE("Reserve");
    auto request = Made<v1::ReserveRequest>(keys);
    request.set_count(4096);
    request.set_fragment_bytes(512);
    ExpectHarmless([&] {
      v1::ReserveResponse response;
      ASSERT_TRUE(Reserve(context_, *session_, request, &response).ok());
      v1::AbortRequest abort;
      *abort.mutable_offsets() = response.offsets();
      EXPECT_TRUE(Abort(context_, *session_, abort).ok());
    });
  }
  {
    SCOPED_TRACE("Stats");
    ExpectHarmless([&] {
      v1::StatsResponse response;
      FillStats(context_, {"node", "1", "here", {}}, &response);
    });
  }
  {
    SCOPED_TRACE("a snapshot of all pages");
    ExpectHarmless([&] {
      size_t pages = 0;
      store_->ForEachPage(keyspace_->id, [&](const PageKey&, Tier) { ++pages; });
      EXPECT_GT(pages, static_cast<size_t>(kKeysMax));
    });
  }
  {
    SCOPED_TRACE("Delete");
    const auto request = Made<v1::DeleteRequest>(keys);
    ExpectHarmless(
        [&] {
          v1::DeleteResponse response;
          Await([&](Done done) { Delete(context_, request, &response, std::move(done)); });
          EXPECT_EQ(response.deleted_pages(), static_cast<uint32_t>(kKeysMax));
        },
        [&] { StoreChain(1, kKeysMax); });
  }
}

TEST_F(WorstRequestsTest, DropOfAKeyspaceOfManyPages) {
  v1::DropKeyspaceRequest request;
  request.set_keyspace(std::string(keyspace_->id.view()));
  ExpectHarmless(
      [&] {
        v1::DropKeyspaceResponse response;
        Await([&](Done done) { DropKeyspace(context_, request, &response, std::move(done)); });
        EXPECT_EQ(store_->Stats().host.pages, 0u);
      },
      [&] { StoreChain(1, 3 * kKeysMax); });
}

// A full tier of which every page is pinned: nothing can leave, and a Put must find that out.
TEST_F(WorstRequestsTest, PutIntoMemoryOfWhichEveryPageIsPinned) {
  StoreChain(1, 2 * kKeysMax);
  for (int half = 0; half < 2; ++half) {
    std::vector<PageKey> keys;
    for (int i = 0; i < kKeysMax; ++i) keys.push_back(FamilyKey(1, half * kKeysMax + i));
    const TimePoint until = Clock::Real().Now() + std::chrono::hours(1);
    ASSERT_EQ(store_->Pin(keyspace_->id, keys, until).value(), keys.size());
  }
  // A fragment of 20 MiB for each 20 MiB of memory, then one more.
  const auto large = static_cast<uint64_t>(20) << 20;
  std::vector<std::shared_ptr<storage::IncomingSlot>> held;
  while (true) {
    auto slot = store_->ReserveIncoming(keyspace_->id, large);
    if (!slot.ok()) break;
    held.push_back(*std::move(slot));
  }
  ExpectHarmless([&] { EXPECT_FALSE(store_->ReserveIncoming(keyspace_->id, large).ok()); });
}

}  // namespace
}  // namespace crumb::server
