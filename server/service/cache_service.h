// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <memory>

#include "crumb/v1/cache_service.grpc.pb.h"
#include "server/calls/call_context.h"
#include "server/calls/call_scope.h"
#include "server/calls/status_calls.h"
#include "server/service/stall_watch.h"
#include "server/service/stream_registry.h"
#include "server/service/streams.h"

namespace crumb::server {

// Implements crumb.v1.CacheService on gRPC's callback interface: finds the session, calls
// server/calls and returns the status. No handler blocks. Thread-safe.
class CacheService final
    : public v1::CacheService::WithRawCallbackMethod_Get<v1::CacheService::CallbackService> {
 public:
  // The members of `context`, and `stalls`, must outlive this.
  CacheService(const CallContext& context, StallWatch& stalls, NodeInfo node)
      : context_(context),
        node_(std::move(node)),
        calls_(context.limits, context.part_max_percent),
        stalls_(stalls) {}

  // Ends the streams that would last for ever and refuses new ones.
  void StopStreams() { streams_.Stop(absl::UnavailableError("crumbd is stopping")); }

  template <typename T>
  using Writer = grpc::ServerWriteReactor<T>;
  using Context = grpc::CallbackServerContext;
  using Unary = grpc::ServerUnaryReactor;

  // Keyspaces.
  Unary* OpenKeyspace(Context*, const v1::OpenKeyspaceRequest*, v1::OpenKeyspaceResponse*) override;
  Unary* SetKeyspaceState(Context*, const v1::SetKeyspaceStateRequest*,
                          v1::SetKeyspaceStateResponse*) override;
  Unary* DropKeyspace(Context*, const v1::DropKeyspaceRequest*, v1::DropKeyspaceResponse*) override;

  // Leases.
  Unary* Acquire(Context*, const v1::AcquireRequest*, v1::AcquireResponse*) override;
  Unary* Lookup(Context*, const v1::LookupRequest*, v1::LookupResponse*) override;
  Unary* Release(Context*, const v1::ReleaseRequest*, v1::ReleaseResponse*) override;
  Unary* Prefetch(Context*, const v1::PrefetchRequest*, v1::PrefetchResponse*) override;

  // Staging memory.
  Unary* Reserve(Context*, const v1::ReserveRequest*, v1::ReserveResponse*) override;
  Unary* Commit(Context*, const v1::CommitRequest*, v1::CommitResponse*) override;
  Unary* Abort(Context*, const v1::AbortRequest*, v1::AbortResponse*) override;
  Unary* ClaimSlots(Context*, const v1::ClaimSlotsRequest*, v1::ClaimSlotsResponse*) override;
  Unary* ScrubSlots(Context*, const v1::ScrubSlotsRequest*, v1::ScrubSlotsResponse*) override;

  // Pages.
  Unary* Flush(Context*, const v1::FlushRequest*, v1::FlushResponse*) override;
  Unary* Pin(Context*, const v1::PinRequest*, v1::PinResponse*) override;
  Unary* Unpin(Context*, const v1::UnpinRequest*, v1::UnpinResponse*) override;
  Unary* Delete(Context*, const v1::DeleteRequest*, v1::DeleteResponse*) override;

  // The node.
  Unary* Stats(Context*, const v1::StatsRequest*, v1::StatsResponse*) override;
  Unary* ListNodes(Context*, const v1::ListNodesRequest*, v1::ListNodesResponse*) override;
  Unary* LocatePage(Context*, const v1::LocatePageRequest*, v1::LocatePageResponse*) override;
  Unary* DrainNode(Context*, const v1::DrainNodeRequest*, v1::DrainNodeResponse*) override;

  // Streams.
  Writer<grpc::ByteBuffer>* Get(Context*, const grpc::ByteBuffer*) override;
  grpc::ServerReadReactor<v1::PutRequest>* Put(Context*, v1::PutResponse*) override;
  Writer<v1::WatchEventsResponse>* WatchEvents(Context*, const v1::WatchEventsRequest*) override;
  grpc::ServerBidiReactor<v1::SessionRequest, v1::SessionResponse>* Session(Context*) override;

 private:
  using Message = google::protobuf::Message;

  // Returns whether the call may be made: its caller is known, and there is room for it and its
  // request. `request` is null if it is read later. `context` becomes the caller's. The bounds of
  // the request's fields are checked by the call itself, in its turn.
  absl::Status Admit(CallScope& scope, const Context& call, const Message* request,
                     CallContext& context) const;
  // Finishes with the status of `call`, which does not block. `call` may run later, on another
  // thread (RunInTurn): it must refer to nothing but this, the call, its request and its response.
  Unary* Respond(Context* call_context, Rpc rpc, const Message& request, Message* response,
                 std::function<absl::Status(const CallContext&)> call);
  // Finishes once `call` has called back; the same holds for it.
  Unary* RespondLater(Context* call_context, Rpc rpc, const Message& request, Message* response,
                      std::function<void(const CallContext&, Done)> call);

  StreamParts parts() { return {calls_, stalls_}; }
  std::unique_ptr<CallScope> NewScope(Rpc rpc) {
    return std::make_unique<CallScope>(context_, calls_, rpc);
  }

  const CallContext context_;
  const NodeInfo node_;
  CallsInProgress calls_;
  StreamRegistry streams_;
  StallWatch& stalls_;
};

}  // namespace crumb::server
