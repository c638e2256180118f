// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <string>
#include <utility>
#include <vector>

#include "server/cluster/peer.h"

namespace crumb::server {

// Another node in the view, which responds to no call.
class QuietPeer final : public Peer {
 public:
  explicit QuietPeer(const std::string& id)
      : Peer(RecordOf(id), {.failures = 1, .open_for = std::chrono::seconds(1)}, Clock::Real()) {}
  static v1::NodeRecord RecordOf(const std::string& id) {
    v1::NodeRecord record;
    record.set_id(id);
    return record;
  }
  void Acquire(v1::PeerAcquireRequest, TimePoint, Callback<v1::PeerAcquireResponse>) override {}
  void Release(uint64_t) override {}
  void Push(v1::PeerPushRequest, TimePoint, Callback<v1::PeerPushResponse>) override {}
  void Keyspaces(v1::PeerKeyspacesRequest, TimePoint,
                 Callback<v1::PeerKeyspacesResponse>) override {}
  void Drain(TimePoint, Callback<v1::PeerDrainResponse>) override {}
  // Keeps the request, and with it the memory for its pages, until `fetches` is cleared.
  void Fetch(transport::FetchRequest request, transport::FetchDone done) override {
    fetches.emplace_back(std::move(request), std::move(done));
  }
  const char* transport() const override { return "fake"; }

  void CompleteFetches() {
    for (auto& [request, done] : std::exchange(fetches, {})) {
      transport::FetchResponse response;
      response.pages.resize(request.pages.size());
      for (auto& page : response.pages) page.status = transport::PageStatus::kAbsent;
      done(std::move(response));
    }
  }

  std::vector<std::pair<transport::FetchRequest, transport::FetchDone>> fetches;
};

}  // namespace crumb::server
