// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
// How one tenant takes all it can get of the resources of running calls: processors, by calls on as
// many pages as a request may name, all of which are in host memory, and memory for requests,
// responses, leases, announced pages and snapshots.
#include <chrono>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "gtest/gtest.h"
#include "tests/server/flood.h"
#include "tests/server/two_tenants.h"

namespace crumb::server {
namespace {

constexpr int kManyPages = 16'384;  // limits.acquire_keys_max
constexpr int kFirstOfMany = 8'000'000;
// Lookups at once: more than crumbd and gRPC have threads.
constexpr int kCallers = 32;

// Stores pages of one tile, by default as many as a call may name. REQUIRES: 512 divides `count`.
void StoreManyPages(const Attacker& a, int count = kManyPages) {
  constexpr int kPart = 512;
  for (int first = kFirstOfMany; first < kFirstOfMany + count; first += kPart) {
    std::vector<std::vector<std::byte>> fragments;
    for (int page = first; page < first + kPart; ++page) {
      fragments.push_back(a.session.Fragment(TestClient::Key(page), 1, {{0, 1}, {0, 1}}));
    }
    v1::PutResponse response;
    ASSERT_TRUE(a.session.Put(fragments, &response).ok());
  }
}

template <typename Request>
Request OfManyPages(const Attacker& a, int count = kManyPages) {
  Request request;
  request.set_keyspace(a.session.keyspace().keyspace());
  request.set_keys(TestClient::Keys(kFirstOfMany, count));
  if constexpr (requires { request.mutable_range(); }) {
    request.mutable_range()->set_layer_end(1);
    request.mutable_range()->set_head_end(1);
  }
  return request;
}

// Each caller has a connection of its own, so that the calls do not wait for each other there.
std::shared_ptr<TwoTenants::Stub> OwnStub(const Attacker& a) {
  return std::shared_ptr(a.crumbd.NewStub());
}

// Callers that are refused wait a little: refusals are not to take the machine's processors, which
// the clients of the test need.
void FloodLookups(const Attacker& a) {
  StoreManyPages(a);
  const auto request = OfManyPages<v1::LookupRequest>(a);
  for (int caller = 0; caller < kCallers; ++caller) {
    a.attack.kept.push_back(std::make_shared<Flood>(1, [request, stub = OwnStub(a)] {
      v1::LookupResponse response;
      const auto context = TwoTenants::Context("a");
      if (stub->Lookup(context.get(), request, &response).ok()) return;
      std::this_thread::sleep_for(std::chrono::milliseconds(200));
    }));
  }
}

void FloodGets(const Attacker& a, int callers, const v1::GetRequest& request) {
  for (int caller = 0; caller < callers; ++caller) {
    a.attack.kept.push_back(std::make_shared<Flood>(1, [request, stub = OwnStub(a)] {
      const auto context = TwoTenants::Context("a");
      const auto stream = stub->Get(context.get(), request);
      v1::GetResponse part;
      while (stream->Read(&part)) {
      }
      if (stream->Finish().ok()) return;
      std::this_thread::sleep_for(std::chrono::milliseconds(200));
    }));
  }
}

void FloodGetsOfManyPages(const Attacker& a) {
  StoreManyPages(a);
  FloodGets(a, kFloodThreads, OfManyPages<v1::GetRequest>(a));
}

// Gets with 3 MiB of a field that crumbd does not know. Three of them are more than a tenant's part
// of the least budget.
void FloodLongGets(const Attacker& a) {
  constexpr int kPages = 512;
  constexpr int kLongCallers = 8;
  constexpr int kUnknownField = 1'000;
  StoreManyPages(a, kPages);
  v1::GetRequest request = OfManyPages<v1::GetRequest>(a, kPages);
  request.GetReflection()->MutableUnknownFields(&request)->AddLengthDelimited(
      kUnknownField, std::string(3 << 20, 'x'));
  FloodGets(a, kLongCallers, request);
}

void FloodAcquires(const Attacker& a) {
  StoreManyPages(a);
  const auto request = OfManyPages<v1::AcquireRequest>(a);
  for (int caller = 0; caller < kFloodThreads; ++caller) {
    a.attack.kept.push_back(
        std::make_shared<Flood>(1, [request, &session = a.session, stub = OwnStub(a)] {
          v1::AcquireResponse response;
          stub->Acquire(session.Context().get(), request, &response);
          if (response.lease() == 0) return;
          v1::ReleaseRequest release;
          release.add_leases(response.lease());
          v1::ReleaseResponse released;
          stub->Release(session.Context().get(), release, &released);
        }));
  }
}

// Stats of many keyspaces with long names. Nothing reads the responses.
void UnreadStats(const Attacker& a) {
  constexpr int kKeyspaces = 100;
  constexpr int kCalls = 200;
  for (int i = 0; i < kKeyspaces; ++i) {
    ASSERT_TRUE(a.session.OpenKeyspace(std::to_string(i) + std::string(1'000, 'm')).ok());
  }
  ASSERT_TRUE(a.session.OpenKeyspace("of a").ok());
  const auto queue = std::make_shared<grpc::CompletionQueue>();
  const auto stub = OwnStub(a);
  a.attack.kept.insert(a.attack.kept.end(), {queue, stub});
  for (int i = 0; i < kCalls; ++i) {
    const std::shared_ptr call =
        stub->PrepareAsyncStats(a.Context(), v1::StatsRequest(), queue.get());
    call->StartCall();
    call->ReadInitialMetadata(call.get());  // the message would be read by Finish
    a.attack.kept.push_back(call);
  }
  a.attack.kept.push_back(std::make_shared<Flood>(1, [queue] {  // sends the requests
    void* tag = nullptr;
    bool ok = false;
    queue->AsyncNext(&tag, &ok, std::chrono::system_clock::now() + std::chrono::milliseconds(10));
  }));
}

// Each page by a lease of its own.
void LeasePagesOneByOne(const Attacker& a) {
  for (int page = 0; page < 2 * a.crumbd.options().sessions.leases_max; ++page) {
    v1::AcquireResponse response;
    a.session.Acquire(TestClient::Keys(kAttackerPages - 1 - page % 100, 1), &response);
  }
}

// Announces pages that never come.
void AnnouncePages(const Attacker& a) {
  v1::ReserveRequest request;
  request.set_count(1);
  request.set_fragment_bytes(512);
  request.set_keyspace(a.session.keyspace().keyspace());
  request.set_keys(TestClient::Keys(kFirstOfMany, kManyPages));
  v1::ReserveResponse response;
  ASSERT_TRUE(a.session.stub().Reserve(a.session.Context().get(), request, &response).ok());
}

// Snapshots of all pages. Nothing reads them.
void UnreadSnapshots(const Attacker& a) {
  const auto stub = OwnStub(a);
  a.attack.kept.push_back(stub);
  StoreManyPages(a);
  for (int i = 0; i < 4; ++i) {
    v1::WatchEventsRequest request;
    request.set_keyspace(a.session.keyspace().keyspace());
    request.set_snapshot(true);
    a.attack.kept.push_back(std::shared_ptr(stub->WatchEvents(a.Context(), request)));
  }
}

std::string Rejected(const std::string& reason) {
  return "crumb_rejected_total{reason=\"" + reason + "\"}";
}

void MakeRoom(Options& options) {
  options.store.host.bytes_max = ByteSize{128 << 20};
  options.store.host.slab_bytes = ByteSize{128 << 20};
}

}  // namespace

std::vector<BudgetRow> CallBudgetRows() {
  return {
      {"lookups", "", FloodLookups, MakeRoom},
      {"gets_of_many_pages", "", FloodGetsOfManyPages, MakeRoom},
      {"acquires_of_many_pages", "", FloodAcquires, MakeRoom},
      {"large_calls", Rejected("large_calls"), FloodLookups,
       [](Options& options) {
         MakeRoom(options);
         options.limits.large_call_queue = 4;
       }},
      // Requests that wait for a thread; each has 512 KiB.
      {"request_bytes", Rejected("request_bytes"), FloodLookups,
       [](Options& options) {
         MakeRoom(options);
         options.limits.request_bytes_max = ByteSize{16 << 20};
       }},
      {"request_bytes_of_gets", Rejected("request_bytes"), FloodLongGets,
       [](Options& options) {
         MakeRoom(options);
         options.limits.request_bytes_max = ByteSize{16 << 20};
       }},
      {"responses", Rejected("responses"), UnreadStats,
       [](Options& options) {
         options.limits.keyspaces_max = 512;
         options.limits.response_bytes_max = ByteSize{4 << 20};
       }},
      {"leases_of_an_engine", Rejected("lease_budget"), LeasePagesOneByOne,
       [](Options& options) { options.sessions.leases_max = 256; }},
      {"pending_pages", "crumb_pending_pages_forgotten_total", AnnouncePages,
       [](Options& options) { options.store.pending_pages_max = 4'096; }},
      {"snapshots", Rejected("watchers"), UnreadSnapshots,
       [](Options& options) {
         MakeRoom(options);
         options.limits.watch_snapshot_total_pages_max = 65'536;
       }},
  };
}

}  // namespace crumb::server
