// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
// How one tenant takes all it can get of the processors, by calls that wait for nothing else.
#include <atomic>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "gtest/gtest.h"
#include "tests/server/two_tenants.h"

namespace crumb::server {
namespace {

// Calls of one method without end, so many at a time that the caller's next one waits already when
// one has ended. One thread sends them all.
template <typename Response>
class CallsInFlight {
 public:
  using Reader = std::unique_ptr<grpc::ClientAsyncResponseReader<Response>>;
  using Start = std::function<Reader(grpc::ClientContext*, grpc::CompletionQueue*)>;
  using Ended = std::function<void(const Response&)>;

  CallsInFlight(int calls, Start start, Ended ended = {})
      : start_(std::move(start)), ended_(std::move(ended)), calls_(static_cast<size_t>(calls)) {
    thread_ = std::thread([this] { Run(); });
  }
  ~CallsInFlight() {
    stop_ = true;
    thread_.join();
  }

 private:
  struct Call {
    std::unique_ptr<grpc::ClientContext> context;
    Reader reader;
    Response response;
    grpc::Status status;
  };

  void Begin(Call& call) {
    call.context = TwoTenants::Context("a");
    call.response.Clear();
    call.reader = start_(call.context.get(), &queue_);
    call.reader->Finish(&call.response, &call.status, &call);
  }
  void Run() {
    for (Call& call : calls_) Begin(call);
    size_t left = calls_.size();
    void* tag = nullptr;
    bool ok = false;
    while (left > 0 && queue_.Next(&tag, &ok)) {
      Call& call = *static_cast<Call*>(tag);
      if (ended_ && call.status.ok()) ended_(call.response);
      if (stop_) {
        --left;
      } else {
        Begin(call);
      }
    }
  }

  const Start start_;
  const Ended ended_;
  std::atomic<bool> stop_{false};
  grpc::CompletionQueue queue_;
  std::vector<Call> calls_;
  std::thread thread_;
};

constexpr int kManyPages = 16'384;  // limits.acquire_keys_max
constexpr int kFirstOfMany = 8'000'000;

// As many pages of one tile as a call may name.
void StoreManyPages(const Attacker& a) {
  constexpr int kPart = 512;
  for (int first = kFirstOfMany; first < kFirstOfMany + kManyPages; first += kPart) {
    std::vector<std::vector<std::byte>> fragments;
    for (int page = first; page < first + kPart; ++page) {
      fragments.push_back(a.session.Fragment(TestClient::Key(page), 1, {{0, 1}, {0, 1}}));
    }
    v1::PutResponse response;
    ASSERT_TRUE(a.session.Put(fragments, &response).ok());
  }
}

template <typename Request>
Request OfManyPages(const Attacker& a) {
  Request request;
  request.set_keyspace(a.session.keyspace().keyspace());
  request.set_keys(TestClient::Keys(kFirstOfMany, kManyPages));
  if constexpr (requires { request.mutable_range(); }) {
    request.mutable_range()->set_layer_end(1);
    request.mutable_range()->set_head_end(1);
  }
  return request;
}

// Lookups of pages that are all there, which are answered without waiting for anything but a
// processor.
void FloodLookups(const Attacker& a) {
  StoreManyPages(a);
  const auto request = OfManyPages<v1::LookupRequest>(a);
  a.attack.kept.push_back(std::make_shared<CallsInFlight<v1::LookupResponse>>(
      128, [request, stub = std::shared_ptr(a.crumbd.NewStub())](auto* context, auto* queue) {
        return stub->AsyncLookup(context, request, queue);
      }));
}

}  // namespace

std::vector<BudgetRow> LookupBudgetRows() {
  return {
      {"lookups", "", FloodLookups,
       [](Options& options) {
         options.store.host.bytes_max = ByteSize{128 << 20};
         options.store.host.slab_bytes = ByteSize{128 << 20};
       }},
  };
}

}  // namespace crumb::server
