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
#include "server/service/unary_call.h"

namespace crumb::server {

using RawPeerService =
    WithRaw<v1::PeerService::CallbackService, v1::PeerService::WithRawCallbackMethod_PeerHello,
            v1::PeerService::WithRawCallbackMethod_PeerAcquire,
            v1::PeerService::WithRawCallbackMethod_PeerRelease,
            v1::PeerService::WithRawCallbackMethod_PeerPush,
            v1::PeerService::WithRawCallbackMethod_PeerKeyspaces,
            v1::PeerService::WithRawCallbackMethod_PeerDrain>::Type;

// Implements crumb.v1.PeerService, the calls between crumbds, on gRPC's callback interface: checks
// that the caller is a crumbd (CheckPeerName) and carries calls over to server/cluster. Tenants
// have no part in these calls, so one budget holds for all. No handler blocks. GrpcServer owns it.
// Thread-safe.
class PeerService final : public RawPeerService {
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
  using Bytes = grpc::ByteBuffer;

  Unary* PeerHello(Context*, const Bytes* in, Bytes* out) override;
  Unary* PeerAcquire(Context*, const Bytes* in, Bytes* out) override;
  Unary* PeerRelease(Context*, const Bytes* in, Bytes* out) override;
  Unary* PeerPush(Context*, const Bytes* in, Bytes* out) override;
  Unary* PeerKeyspaces(Context*, const Bytes* in, Bytes* out) override;
  Unary* PeerDrain(Context*, const Bytes* in, Bytes* out) override;
  grpc::ServerWriteReactor<v1::PeerReadResponse>* PeerRead(Context*,
                                                           const v1::PeerReadRequest*) override;

 private:
  // Finishes once `call` has called back, which runs if the caller is a node, there is a place for
  // the call and room for its request, and no field of the request is longer than its bound.
  template <typename Request, typename Response>
  Unary* Respond(Context* call_context, Rpc rpc, const EncodedMessages& encoded,
                 const std::function<void(const Request&, Response*, PeerDone)>& call);

  const CallContext context_;
  Cluster& cluster_;
  StallWatch& stalls_;
  const std::string peer_name_;
  CallsInProgress calls_;
};

}  // namespace crumb::server
