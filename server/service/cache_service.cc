// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "server/service/cache_service.h"

#include <cstdint>
#include <utility>

#include "common/status_macros.h"
#include "server/calls/field_bounds.h"
#include "server/service/call_metadata.h"
#include "server/service/grpc_status.h"
#include "server/service/unary_call.h"

namespace crumb::server {
namespace {

// Memory of a request that counts in limits.request_bytes_max. That of small ones is bounded by
// limits.requests_max alone.
uint64_t CountedBytes(const google::protobuf::Message& request) {
  return request.ByteSizeLong() <= kSmallRequestBytesMax ? 0 : request.SpaceUsedLong();
}

}  // namespace

absl::Status CacheService::Admit(CallScope& scope, const Context& call, const Message* request,
                                 CallContext& context) const {
  CRUMB_ASSIGN_OR_RETURN(context.caller, CallerOf(call, context));
  return scope.Admit(context.caller.name(), request == nullptr ? 0 : CountedBytes(*request));
}

grpc::ServerUnaryReactor* CacheService::Respond(
    Context* call_context, Rpc rpc, const Message& request, Message* response,
    std::function<absl::Status(const CallContext&)> call) {
  return RespondLater(call_context, rpc, request, response,
                      [call = std::move(call)](const CallContext& context, const Done& done) {
                        done(call(context));
                      });
}

grpc::ServerUnaryReactor* CacheService::RespondLater(
    Context* call_context, Rpc rpc, const Message& request, Message* response,
    std::function<void(const CallContext&, Done)> call) {
  const auto reactor =
      std::make_shared<UnaryCall>(context_, parts(), rpc, *call_context, *response);
  reactor->Begin();
  const Done done = [ending = reactor.get()](const absl::Status& status) { ending->End(status); };
  CallContext context = context_;
  const absl::Status admitted = Admit(reactor->scope(), *call_context, &request, context);
  if (admitted.ok()) {
    reactor->SetTenant(context.caller.name());
    // The cost of Stats grows with the number of keyspaces and sessions.
    const size_t bytes = rpc == Rpc::kStats ? SIZE_MAX : request.ByteSizeLong();
    RunInTurn(
        context, bytes,
        [context, &request, call = std::move(call), done] {
          const absl::Status fits = CheckFields(context.limits, request);
          return fits.ok() ? call(context, done) : done(fits);
        },
        done);
  } else {
    done(admitted);
  }
  return reactor.get();
}

grpc::ServerWriteReactor<grpc::ByteBuffer>* CacheService::Get(Context* call,
                                                              const grpc::ByteBuffer* request) {
  auto scope = NewScope(Rpc::kGet);
  CallContext context = context_;
  const absl::Status admitted = Admit(*scope, *call, /*request=*/nullptr, context);
  return StartGet(context, admitted, parts(), std::move(scope), *call, *request);
}

grpc::ServerReadReactor<v1::PutRequest>* CacheService::Put(Context* call,
                                                           v1::PutResponse* response) {
  auto scope = NewScope(Rpc::kPut);
  CallContext context = context_;
  const absl::Status admitted = Admit(*scope, *call, /*request=*/nullptr, context);
  return StartPut(context, admitted, parts(), std::move(scope), *call, response);
}

grpc::ServerWriteReactor<v1::WatchEventsResponse>* CacheService::WatchEvents(
    Context* call, const v1::WatchEventsRequest* request) {
  auto scope = NewScope(Rpc::kWatchEvents);
  CallContext context = context_;
  absl::Status admitted = Admit(*scope, *call, request, context);
  if (admitted.ok()) admitted = CheckFields(context.limits, *request);
  return StartWatch(context, admitted, streams_, stalls_, std::move(scope), *call, *request);
}

grpc::ServerBidiReactor<v1::SessionRequest, v1::SessionResponse>* CacheService::Session(
    Context* call) {
  auto scope = NewScope(Rpc::kSession);
  CallContext context = context_;
  const absl::Status admitted = Admit(*scope, *call, /*request=*/nullptr, context);
  return StartSessionStream(context, streams_, stalls_, std::move(scope), *call,
                            admitted.ok() ? SessionOf(*call, context) : admitted);
}

}  // namespace crumb::server
