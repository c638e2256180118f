// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>

#include "crumb/v1/peer_service.grpc.pb.h"
#include "server/base/outgoing_calls.h"
#include "server/base/tls_credentials.h"
#include "server/cluster/peer.h"
#include "transport/transport.h"

namespace crumb::server {

// This node as it names itself in calls to others.
struct CallerInfo {
  // Id of this node, id of its process, and the highest version of PeerService that it supports.
  std::string node;
  std::string incarnation;
  uint32_t wire_max = kWireMax;
};

enum class ConnectWhen : uint8_t { kAtFirstCall, kNow };

// A channel to `address`, made once for each; connects in the background when `when` says, and
// again when it breaks.
std::shared_ptr<v1::PeerService::Stub> PeerStub(const std::string& address,
                                                const PeerChannel& channel, ConnectWhen when);

// A node behind gRPC for control and, where both have it, a transport for bytes. Without a
// transport, or if the two have no version of its frames in common, bytes are read as gRPC messages
// and checked tile by tile as they arrive.
class GrpcPeer final : public Peer, public std::enable_shared_from_this<GrpcPeer> {
 public:
  // `transport` may be null; it and `clock` must outlive this.
  GrpcPeer(v1::NodeRecord record, const Breaker::Options& options, const Clock& clock,
           CallerInfo caller, std::shared_ptr<v1::PeerService::Stub> stub,
           std::shared_ptr<OutgoingCalls> calls, transport::Transport* transport);

  void Acquire(v1::PeerAcquireRequest request, TimePoint deadline,
               Callback<v1::PeerAcquireResponse> done) override;
  void Release(uint64_t lease) override;
  void Push(v1::PeerPushRequest request, TimePoint deadline,
            Callback<v1::PeerPushResponse> done) override;
  void Keyspaces(v1::PeerKeyspacesRequest request, TimePoint deadline,
                 Callback<v1::PeerKeyspacesResponse> done) override;
  void Drain(TimePoint deadline, Callback<v1::PeerDrainResponse> done) override;
  void Fetch(transport::FetchRequest request, transport::FetchDone done) override;
  const char* transport() const override { return UsesTransport() ? "ucx" : "grpc"; }

 private:
  // Returns whether both nodes have a transport.
  bool UsesTransport() const {
    return transport_ != nullptr && !record().transport_address().empty();
  }
  // Fills in this node's id and the highest wire version that both nodes support.
  void FillCaller(v1::PeerCaller* caller) const;

  const Clock& clock_;
  const CallerInfo caller_;
  const std::shared_ptr<v1::PeerService::Stub> stub_;
  const std::shared_ptr<OutgoingCalls> calls_;
  transport::Transport* const transport_;
};

}  // namespace crumb::server
