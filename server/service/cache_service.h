// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <utility>

#include "crumb/v1/cache_service.grpc.pb.h"
#include "server/calls/call_context.h"
#include "server/calls/call_scope.h"
#include "server/calls/field_bounds.h"
#include "server/calls/status_calls.h"
#include "server/service/stall_watch.h"
#include "server/service/stream_registry.h"
#include "server/service/streams.h"
#include "server/service/unary_call.h"

namespace crumb::server {

// The service with raw methods; Put, WatchEvents and Session, whose messages gRPC decodes, are not
// among them.
using RawCacheService = WithRaw<
    v1::CacheService::CallbackService, v1::CacheService::WithRawCallbackMethod_OpenKeyspace,
    v1::CacheService::WithRawCallbackMethod_SetKeyspaceState,
    v1::CacheService::WithRawCallbackMethod_DropKeyspace,
    v1::CacheService::WithRawCallbackMethod_Acquire, v1::CacheService::WithRawCallbackMethod_Lookup,
    v1::CacheService::WithRawCallbackMethod_Release,
    v1::CacheService::WithRawCallbackMethod_Prefetch,
    v1::CacheService::WithRawCallbackMethod_Reserve, v1::CacheService::WithRawCallbackMethod_Commit,
    v1::CacheService::WithRawCallbackMethod_Abort,
    v1::CacheService::WithRawCallbackMethod_ClaimSlots,
    v1::CacheService::WithRawCallbackMethod_ScrubSlots,
    v1::CacheService::WithRawCallbackMethod_Flush, v1::CacheService::WithRawCallbackMethod_Pin,
    v1::CacheService::WithRawCallbackMethod_Unpin, v1::CacheService::WithRawCallbackMethod_Delete,
    v1::CacheService::WithRawCallbackMethod_Stats,
    v1::CacheService::WithRawCallbackMethod_ListNodes,
    v1::CacheService::WithRawCallbackMethod_LocatePage,
    v1::CacheService::WithRawCallbackMethod_DrainNode,
    v1::CacheService::WithRawCallbackMethod_Get>::Type;

// Implements crumb.v1.CacheService on gRPC's callback interface: finds the session, calls
// server/calls and returns the status. It knows the rules of no call. No handler blocks: handlers
// run on gRPC's callback threads, and work that takes time goes to an executor and calls back.
// GrpcServer owns it. Thread-safe.
//
// The way of a unary call: the caller is identified and a place is taken (Admit); the request is
// decoded, at once or on the threads for large calls (RunInTurn); its fields are checked
// (CheckFields); the function in server/calls runs; the response is encoded and sent
// (UnaryCall::End).
class CacheService final : public RawCacheService {
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
  using Bytes = grpc::ByteBuffer;

  // Keyspaces.
  Unary* OpenKeyspace(Context*, const Bytes*, Bytes*) override;
  Unary* SetKeyspaceState(Context*, const Bytes*, Bytes*) override;
  Unary* DropKeyspace(Context*, const Bytes*, Bytes*) override;

  // Leases.
  Unary* Acquire(Context*, const Bytes*, Bytes*) override;
  Unary* Lookup(Context*, const Bytes*, Bytes*) override;
  Unary* Release(Context*, const Bytes*, Bytes*) override;
  Unary* Prefetch(Context*, const Bytes*, Bytes*) override;

  // Staging memory.
  Unary* Reserve(Context*, const Bytes*, Bytes*) override;
  Unary* Commit(Context*, const Bytes*, Bytes*) override;
  Unary* Abort(Context*, const Bytes*, Bytes*) override;
  Unary* ClaimSlots(Context*, const Bytes*, Bytes*) override;
  Unary* ScrubSlots(Context*, const Bytes*, Bytes*) override;

  // Pages.
  Unary* Flush(Context*, const Bytes*, Bytes*) override;
  Unary* Pin(Context*, const Bytes*, Bytes*) override;
  Unary* Unpin(Context*, const Bytes*, Bytes*) override;
  Unary* Delete(Context*, const Bytes*, Bytes*) override;

  // The node.
  Unary* Stats(Context*, const Bytes*, Bytes*) override;
  Unary* ListNodes(Context*, const Bytes*, Bytes*) override;
  Unary* LocatePage(Context*, const Bytes*, Bytes*) override;
  Unary* DrainNode(Context*, const Bytes*, Bytes*) override;

  // Streams.
  Writer<Bytes>* Get(Context*, const Bytes*) override;
  grpc::ServerReadReactor<v1::PutRequest>* Put(Context*, v1::PutResponse*) override;
  Writer<v1::WatchEventsResponse>* WatchEvents(Context*, const v1::WatchEventsRequest*) override;
  grpc::ServerBidiReactor<v1::SessionRequest, v1::SessionResponse>* Session(Context*) override;

 private:
  // Returns whether a stream may begin: its caller is known, and there is a place for it, and room
  // for a request of so many encoded bytes. `context` becomes the caller's.
  absl::Status Admit(CallScope& scope, const Context& call, CallContext& context,
                     size_t request_bytes = 0) const;
  // Returns the same for a unary call, whose request takes room.
  absl::Status Admit(UnaryCall& unary, const Context& call, CallContext& context) const;

  // Finishes with the status of `call`, which does not block. `call` may run later, on another
  // thread (RunInTurn): it must refer to nothing but this and its arguments.
  template <typename Request, typename Response>
  Unary* Respond(Context* call_context, Rpc rpc, const EncodedMessages& encoded,
                 std::function<absl::Status(const CallContext&, const Request&, Response*)> call);
  // Finishes once `call` has called back; the same holds for it.
  template <typename Request, typename Response>
  Unary* RespondLater(
      Context* call_context, Rpc rpc, const EncodedMessages& encoded,
      std::function<void(const CallContext&, const Request&, Response*, const Done&)> call);

  StreamParts parts() { return {calls_, stalls_}; }
  // Returns the scope of a stream that has just arrived.
  std::unique_ptr<CallScope> NewScope(Rpc rpc) {
    return std::make_unique<CallScope>(context_, calls_, rpc);
  }

  const CallContext context_;
  const NodeInfo node_;
  // Places of all calls of this service.
  CallsInProgress calls_;
  StreamRegistry streams_;
  StallWatch& stalls_;
};

template <typename Request, typename Response>
grpc::ServerUnaryReactor* CacheService::RespondLater(
    Context* call_context, Rpc rpc, const EncodedMessages& encoded,
    std::function<void(const CallContext&, const Request&, Response*, const Done&)> call) {
  const auto unary = std::make_shared<UnaryCallOf<Request, Response>>(context_, parts(), rpc,
                                                                      *call_context, encoded);
  unary->Begin();
  CallContext context = context_;
  const absl::Status admitted = Admit(*unary, *call_context, context);
  const Done done = [ending = unary.get()](const absl::Status& status) { ending->End(status); };
  if (admitted.ok()) {
    // The cost of Stats grows with the number of keyspaces and sessions.
    const size_t bytes = rpc == Rpc::kStats ? SIZE_MAX : unary->request_bytes();
    RunInTurn(
        context, bytes,
        [context, unary, call = std::move(call), done] {
          absl::Status fits = unary->Decode();
          if (fits.ok()) fits = CheckFields(context.limits, unary->request());
          fits.ok() ? call(context, unary->request(), &unary->response(), done) : done(fits);
        },
        done);
  } else {
    done(admitted);
  }
  return unary.get();
}

template <typename Request, typename Response>
grpc::ServerUnaryReactor* CacheService::Respond(
    Context* call_context, Rpc rpc, const EncodedMessages& encoded,
    std::function<absl::Status(const CallContext&, const Request&, Response*)> call) {
  return RespondLater<Request, Response>(
      call_context, rpc, encoded,
      [call = std::move(call)](const CallContext& context, const Request& request,
                               Response* response,
                               const Done& done) { done(call(context, request, response)); });
}

}  // namespace crumb::server
