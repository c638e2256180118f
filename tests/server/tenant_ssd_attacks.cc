// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
// How one tenant takes all it can get of the queues in front of the SSD.
#include <algorithm>
#include <atomic>
#include <random>

#include "gtest/gtest.h"
#include "tests/server/flood.h"
#include "tests/server/two_tenants.h"

namespace crumb::server {
namespace {

void UseSsd(Options& options) {
  options.store.ssd.path = options.listen.socket_dir + "/data";
  options.store.ssd.bytes_max = ByteSize{uint64_t{256} << 20};
}

// Commits of a session whose stream waits for notices, faster than pages become durable.
void CommitWithoutEnd(const Attacker& a) {
  constexpr int kPieces = 64;
  const auto session = std::shared_ptr(a.crumbd.Open("a"));
  ASSERT_TRUE(session->welcome().error().empty()) << session->welcome().error();
  ASSERT_TRUE(session->OpenKeyspace("of a").ok());
  a.attack.contexts.push_back(session->Context());
  a.attack.kept.push_back(std::shared_ptr(session->stub().Session(a.attack.contexts.back().get())));
  a.attack.kept.push_back(session);
  const auto next = std::make_shared<std::atomic<int>>(2'000'000);
  a.attack.kept.push_back(std::make_shared<Flood>(1, [session, next] {
    const size_t bytes = session->fragment_bytes();
    v1::ReserveRequest reserve;
    reserve.set_count(kPieces);
    reserve.set_fragment_bytes(bytes);
    v1::ReserveResponse reserved;
    session->stub().Reserve(session->Context().get(), reserve, &reserved);
    v1::CommitRequest commit;
    commit.set_keyspace(session->keyspace().keyspace());
    for (const uint64_t offset : reserved.offsets()) {
      const auto fragment = session->Fragment(TestClient::Key(next->fetch_add(1)), 1);
      std::copy(fragment.begin(), fragment.end(), session->staging().data() + offset);
      commit.add_offsets(offset);
      commit.add_header_offsets(session->tiles_bytes());
    }
    v1::CommitResponse response;
    session->stub().Commit(session->Context().get(), commit, &response);
  }));
}

// Commits pages faster than they can be written, and deletes them again, so that the SSD has room
// for all that are there.
void WriteWithoutEnd(const Attacker& a) {
  constexpr int kFirst = 9'000'000;
  constexpr int kPieces = 64;
  constexpr int kCalls = 32;  // pages of so many calls are there at a time
  const auto session = std::shared_ptr(a.crumbd.Open("a", /*staging_bytes=*/16 << 20));
  ASSERT_TRUE(session->welcome().error().empty()) << session->welcome().error();
  ASSERT_TRUE(session->OpenKeyspace("of a").ok());
  a.attack.kept.push_back(session);
  const auto calls = std::make_shared<std::atomic<int>>(0);
  a.attack.kept.push_back(std::make_shared<Flood>(kFloodThreads, [session, calls] {
    const size_t bytes = session->fragment_bytes();
    const int first = kFirst + calls->fetch_add(1) % kCalls * kPieces;
    v1::DeleteRequest gone;
    gone.set_keyspace(session->keyspace().keyspace());
    gone.set_keys(TestClient::Keys(first, kPieces));
    v1::DeleteResponse deleted;
    session->stub().Delete(session->Context().get(), gone, &deleted);
    v1::ReserveRequest reserve;
    reserve.set_count(kPieces);
    reserve.set_fragment_bytes(bytes);
    v1::ReserveResponse reserved;
    session->stub().Reserve(session->Context().get(), reserve, &reserved);
    v1::CommitRequest commit;
    commit.set_keyspace(session->keyspace().keyspace());
    int page = first;
    for (const uint64_t offset : reserved.offsets()) {
      const auto fragment = session->Fragment(TestClient::Key(page++), 1);
      std::copy(fragment.begin(), fragment.end(), session->staging().data() + offset);
      commit.add_offsets(offset);
      commit.add_header_offsets(session->tiles_bytes());
    }
    v1::CommitResponse response;
    session->stub().Commit(session->Context().get(), commit, &response);
  }));
}

// Pages that the attacks below read, twice as many as fit into host memory. They are named in
// random order, so that most of them are not there.
constexpr int kFirstRead = 8'000'000;
constexpr int kPagesRead = 2'600;
constexpr int kPagesOfRead = 32;

void StoreTwiceTheMemory(const Attacker& a) {
  constexpr int kBatch = 100;
  for (int first = kFirstRead; first < kFirstRead + kPagesRead; first += kBatch) {
    std::vector<std::vector<std::byte>> fragments;
    for (int page = first; page < first + kBatch; ++page) {
      fragments.push_back(a.session.Fragment(TestClient::Key(page), 1));
    }
    v1::PutResponse response;
    ASSERT_TRUE(a.session.Put(fragments, &response).ok());
  }
}

int FirstOfRandomRead() {
  thread_local std::minstd_rand random(std::random_device{}());
  return kFirstRead + static_cast<int>(random() % (kPagesRead - kPagesOfRead));
}

// Acquires of pages that are on the SSD, more at a time than its queue has places.
void ReadWithoutEnd(const Attacker& a) {
  StoreTwiceTheMemory(a);
  const auto session = std::shared_ptr(a.crumbd.Open("a"));
  ASSERT_TRUE(session->welcome().error().empty()) << session->welcome().error();
  ASSERT_TRUE(session->OpenKeyspace("of a").ok());
  a.attack.kept.push_back(session);
  a.attack.kept.push_back(std::make_shared<Flood>(kFloodThreads, [session] {
    v1::AcquireResponse response;
    session->Acquire(TestClient::Keys(FirstOfRandomRead(), kPagesOfRead), &response);
    if (response.lease() != 0) session->Release(response.lease());
  }));
}

// Prefetches of pages that are on the SSD, each of which goes on behind its response.
void PrefetchWithoutEnd(const Attacker& a) {
  StoreTwiceTheMemory(a);
  const auto session = std::shared_ptr(a.crumbd.Open("a"));
  ASSERT_TRUE(session->welcome().error().empty()) << session->welcome().error();
  ASSERT_TRUE(session->OpenKeyspace("of a").ok());
  a.attack.kept.push_back(session);
  a.attack.kept.push_back(std::make_shared<Flood>(kFloodThreads, [session] {
    v1::PrefetchRequest request;
    request.set_keyspace(session->keyspace().keyspace());
    request.set_keys(TestClient::Keys(FirstOfRandomRead(), kPagesOfRead));
    v1::PrefetchResponse response;
    session->stub().Prefetch(session->Context().get(), request, &response);
  }));
}

}  // namespace

std::vector<BudgetRow> SsdBudgetRows() {
  return {
      {.name = "durable_waits",
       .limit_reached = "crumb_notices_dropped_total",
       .take = CommitWithoutEnd,
       .change =
           [](Options& options) {
             UseSsd(options);
             options.limits.durable_waits_max = 8;
           }},
      {.name = "ssd_writes",
       .limit_reached = "crumb_write_queue_dropped_total",
       .take = WriteWithoutEnd,
       .change =
           [](Options& options) {
             UseSsd(options);
             options.store.ssd.write_queue_pages_max = 256;
           },
       .keeps_pages = true},
      {.name = "ssd_reads",
       .limit_reached = "crumb_ssd_reads_refused_total",
       .take = ReadWithoutEnd,
       .change =
           [](Options& options) {
             UseSsd(options);
             options.store.ssd.io_threads = 2;
             options.store.ssd.read_queue_pages_max = 4;
           },
       .keeps_pages = true},
      {.name = "prefetches",
       .limit_reached = "crumb_rejected_total{reason=\"prefetches\"}",
       .take = PrefetchWithoutEnd,
       .change =
           [](Options& options) {
             UseSsd(options);
             options.limits.prefetches_max = 4;
             options.limits.tenant_prefetches_max = 2;
           },
       .keeps_pages = true},
  };
}

}  // namespace crumb::server
