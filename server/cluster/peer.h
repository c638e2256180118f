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

// Another node of the cluster, as calls to it. PeerTable holds one for each node of the views;
// requests in progress hold it, too, so it may outlive the node's membership. Calls never block;
// their callbacks run on threads of gRPC or of the transport, exactly once, possibly before the
// call returns, and must not block. Errors are those of gRPC: kUnavailable, kDeadlineExceeded or
// kCancelled if no response came. Callers consult the breaker first and report the outcome to it.
// Thread-safe.
class Peer {
 public:
  template <typename Response>
  using Callback = std::function<void(absl::StatusOr<Response>)>;

  Peer(v1::NodeRecord record, const Breaker::Options& options, const Clock& clock)
      : breaker_(options, clock), record_(std::move(record)) {}
  virtual ~Peer() = default;

  // Returns the node's record as of when this object was made; a changed record makes a new Peer.
  const v1::NodeRecord& record() const { return record_; }
  const std::string& id() const { return record_.id(); }
  Breaker& breaker() { return breaker_; }
  const Breaker& breaker() const { return breaker_; }

  // Leases or finds pages at the node. This function and the next ones fill in the caller's part of
  // the requests.
  virtual void Acquire(v1::PeerAcquireRequest request, TimePoint deadline,
                       Callback<v1::PeerAcquireResponse> done) = 0;
  // Ends a lease of Acquire, without waiting for a response; a lost one ends by cluster.peer_lease.
  virtual void Release(uint64_t lease) = 0;
  // Offers pages to the node, which fetches those that it wants within the call.
  virtual void Push(v1::PeerPushRequest request, TimePoint deadline,
                    Callback<v1::PeerPushResponse> done) = 0;
  // Exchanges a page of keyspace records each way.
  virtual void Keyspaces(v1::PeerKeyspacesRequest request, TimePoint deadline,
                         Callback<v1::PeerKeyspacesResponse> done) = 0;
  // Has the node begin to drain.
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
