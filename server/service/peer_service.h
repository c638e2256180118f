// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <string>
#include <utility>

#include "crumb/v1/peer_service.grpc.pb.h"
#include "server/calls/call_context.h"
#include "server/calls/call_scope.h"
#include "server/cluster/cluster.h"
#include "server/service/stall_watch.h"

namespace crumb::server {

// crumb.v1.PeerService on gRPC's callback interface: carries calls over to server/cluster. No
// handler blocks. Thread-safe.
class PeerService final : public v1::PeerService::CallbackService {
 public:
  // The members of `context`, `cluster` and `stalls` must outlive this. `peer_name`: see
  // CheckPeerName.
  PeerService(const CallContext& context, Cluster& cluster, StallWatch& stalls,
              std::string peer_name)
      : context_(context),
        cluster_(cluster),
        stalls_(stalls),
        peer_name_(std::move(peer_name)),
        calls_(context.limits, /*part_max_percent=*/100) {}

  using Context = grpc::CallbackServerContext;
  using Unary = grpc::ServerUnaryReactor;

  Unary* PeerHello(Context*, const v1::PeerHelloRequest*, v1::PeerHelloResponse*) override;
  Unary* PeerAcquire(Context*, const v1::PeerAcquireRequest*, v1::PeerAcquireResponse*) override;
  Unary* PeerRelease(Context*, const v1::PeerReleaseRequest*, v1::PeerReleaseResponse*) override;
  Unary* PeerPush(Context*, const v1::PeerPushRequest*, v1::PeerPushResponse*) override;
  Unary* PeerKeyspaces(Context*, const v1::PeerKeyspacesRequest*,
                       v1::PeerKeyspacesResponse*) override;
  Unary* PeerDrain(Context*, const v1::PeerDrainRequest*, v1::PeerDrainResponse*) override;
  grpc::ServerWriteReactor<v1::PeerReadResponse>* PeerRead(Context*,
                                                           const v1::PeerReadRequest*) override;

 private:
  // Returns whether the call may be made: its caller is a node, there is a place for it, and no
  // field of its request is longer than its bound.
  absl::Status Admit(CallScope& scope, const Context& call,
                     const google::protobuf::Message& request) const;
  // Finishes once `call` has called back.
  Unary* Respond(Context* call_context, Rpc rpc, const google::protobuf::Message& request,
                 google::protobuf::Message* response, const std::function<void(PeerDone)>& call);

  const CallContext context_;
  Cluster& cluster_;
  StallWatch& stalls_;
  const std::string peer_name_;
  CallsInProgress calls_;
};

}  // namespace crumb::server
