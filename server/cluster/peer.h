// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "crumb/v1/peer_service.pb.h"
#include "server/cluster/breaker.h"
#include "server/cluster/protocol_versions.h"
#include "transport/fetch.h"

namespace crumb::server {

// Calls to another node. They never block; their callbacks run on threads of gRPC or of
// the transport, exactly once, and must not block. Thread-safe.
class Peer {
 public:
  template <typename Response>
  using Callback = std::function<void(absl::StatusOr<Response>)>;

  Peer(v1::NodeRecord record, const Breaker::Options& options, const Clock& clock)
      : breaker_(options, clock), record_(std::move(record)) {}
  virtual ~Peer() = default;

  const v1::NodeRecord& record() const { return record_; }
  const std::string& id() const { return record_.id(); }
  Breaker& breaker() { return breaker_; }
  const Breaker& breaker() const { return breaker_; }

  // The caller's part of the requests is filled in here.
  virtual void Acquire(v1::PeerAcquireRequest request, TimePoint deadline,
                       Callback<v1::PeerAcquireResponse> done) = 0;
  virtual void Release(uint64_t lease) = 0;
  virtual void Push(v1::PeerPushRequest request, TimePoint deadline,
                    Callback<v1::PeerPushResponse> done) = 0;
  virtual void Keyspaces(v1::PeerKeyspacesRequest request, TimePoint deadline,
                         Callback<v1::PeerKeyspacesResponse> done) = 0;
  virtual void Drain(TimePoint deadline, Callback<v1::PeerDrainResponse> done) = 0;

  // Brings pages from the node by the fastest way there is. `done` as of transport::Transport.
  virtual void Fetch(transport::FetchRequest request, transport::FetchDone done) = 0;
  // "ucx" or "grpc".
  virtual const char* transport() const = 0;

 private:
  Breaker breaker_;
  const v1::NodeRecord record_;
};

}  // namespace crumb::server
