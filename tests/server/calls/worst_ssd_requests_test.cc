// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
// The worst well-formed request of each call on pages that are on an SSD, with Lookups beside it:
// worst_requests_test.cc.
#include <filesystem>
#include <string>

#include "server/calls/get_reader.h"
#include "server/calls/keyspace_calls.h"
#include "server/calls/page_calls.h"
#include "tests/common/temporary_folder.h"
#include "tests/server/calls/worst_requests_fixture.h"

namespace crumb::server {
namespace {

class WorstSsdRequestsTest : public WorstRequestsTest {
 protected:
  // Memory for half of the pages of a request, and a queue for all of them.
  static storage::StoreOptions WithSsd(const std::string& folder) {
    storage::StoreOptions options;
    options.host.bytes_max = ByteSize{uint64_t{24} << 20};
    options.host.slab_bytes = ByteSize{uint64_t{24} << 20};
    options.ssd.path = folder;
    options.ssd.bytes_max = ByteSize{uint64_t{512} << 20};
    options.ssd.write_queue_pages_max = 65'536;
    return options;
  }
  WorstSsdRequestsTest() : WorstRequestsTest(WithSsd(Folder())) {}

  // Stores a chain of as many pages as a call may name, and waits until they are on the SSD.
  void StoreOnSsd(int family) {
    constexpr int kPart = 1'024;
    for (int first = 0; first < kKeysMax; first += kPart) {
      for (int i = first; i < first + kPart; ++i) {
        const PageKey parent = i == 0 ? PageKey() : FamilyKey(family, i - 1);
        const absl::Status stored = StorePage(FamilyKey(family, i), parent, {{0, 1}, {0, 1}});
        ASSERT_TRUE(stored.ok()) << "page " << i << ": " << stored;
      }
      FlushAll();
    }
  }
  void FlushAll() {
    v1::FlushResponse response;
    Await([&](Done done) { Flush(context_, {}, &response, std::move(done)); });
  }

 private:
  static std::string Folder() {
    static const TemporaryFolder* const folder = new TemporaryFolder();
    static int stores = 0;
    const std::string path = folder->path() + "/" + std::to_string(stores++);
    std::filesystem::create_directory(path);
    return path;
  }
};

TEST_F(WorstSsdRequestsTest, ReadsOfAsManyPagesAsTheyMayName) {
  StoreOnSsd(1);
  const std::string keys = FamilyKeys(1, kKeysMax);
  {
    SCOPED_TRACE("Lookup");
    const auto request = Made<v1::LookupRequest>(keys);
    ExpectHarmless([&] {
      v1::LookupResponse response;
      Await(
          [&](const Done& done) { Lookup(context_, TimePoint::max(), request, &response, done); });
      EXPECT_EQ(response.hit_pages(), static_cast<uint32_t>(kKeysMax));
    });
  }
  {
    SCOPED_TRACE("Acquire, which waits for pages to be read");
    auto request = Made<v1::AcquireRequest>(keys);
    request.set_wait_ms(2'000);
    v1::AcquireResponse response;
    ExpectHarmless([&] {
      response.Clear();
      Await([&](const Done& done) {
        Acquire(context_, session_, TimePoint::max(), request, &response, done);
      });
      EXPECT_GT(response.hit_pages(), 0u);
      GiveBack(response.lease());
    });
  }
  {
    SCOPED_TRACE("Get, which waits for pages to be read");
    auto request = Made<v1::GetRequest>(keys);
    request.set_wait_ms(2'000);
    ExpectHarmless([&] {
      Await([&](const Done& done) {
        GetReader::Open(context_, request, TimePoint::max(),
                        [done](const auto& reader) { done(reader.status()); });
      });
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
}

TEST_F(WorstSsdRequestsTest, ChangesOfAsManyPagesAsTheyMayName) {
  StoreOnSsd(1);
  const std::string keys = FamilyKeys(1, kKeysMax);
  {
    SCOPED_TRACE("Pin");
    auto request = Made<v1::PinRequest>(keys);
    request.set_ttl_ms(1);
    ExpectHarmless([&] {
      v1::PinResponse response;
      Await([&](const Done& done) { Pin(context_, TimePoint::max(), request, &response, done); });
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
    SCOPED_TRACE("Flush of pages that are not written yet");
    int family = 2;
    ExpectHarmless([&] { FlushAll(); }, [&] { StoreChain(family++, 6'000); });
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
        [&] { StoreOnSsd(1); });
  }
}

TEST_F(WorstSsdRequestsTest, DropOfAKeyspaceOfManyPages) {
  v1::DropKeyspaceRequest request;
  request.set_keyspace(std::string(keyspace_->id.view()));
  ExpectHarmless(
      [&] {
        v1::DropKeyspaceResponse response;
        Await([&](Done done) { DropKeyspace(context_, request, &response, std::move(done)); });
        EXPECT_EQ(store_->Stats().ssd.pages, 0u);
      },
      [&] { StoreOnSsd(1); });
}

}  // namespace
}  // namespace crumb::server
