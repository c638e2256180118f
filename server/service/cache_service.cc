// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "server/service/cache_service.h"

#include <utility>

#include "common/status_macros.h"
#include "server/calls/field_bounds.h"
#include "server/service/call_metadata.h"
#include "server/service/grpc_status.h"
#include "server/service/unary_call.h"

namespace crumb::server {

absl::Status CacheService::Admit(CallScope& scope, const Context& call, const Message* request,
                                 CallContext& context) const {
  CRUMB_ASSIGN_OR_RETURN(context.caller, CallerOf(call, context));
  CRUMB_RETURN_IF_ERROR(scope.Admit(context.caller.name()));
  return request == nullptr ? absl::OkStatus() : CheckFields(context.limits, *request);
}

grpc::ServerUnaryReactor* CacheService::Respond(
    Context* call_context, Rpc rpc, const Message& request, Message* response,
    const std::function<absl::Status(const CallContext&)>& call) {
  return RespondLater(call_context, rpc, request, response,
                      [&](const CallContext& context, const Done& done) { done(call(context)); });
}

grpc::ServerUnaryReactor* CacheService::RespondLater(
    Context* call_context, Rpc rpc, const Message& request, Message* response,
    const std::function<void(const CallContext&, Done)>& call) {
  const auto reactor =
      std::make_shared<UnaryCall>(context_, parts(), rpc, *call_context, *response);
  reactor->Begin();
  const Done done = [call = reactor.get()](const absl::Status& status) { call->End(status); };
  CallContext context = context_;
  const absl::Status admitted = Admit(reactor->scope(), *call_context, &request, context);
  if (admitted.ok()) {
    reactor->SetTenant(context.caller.name());
    call(context, done);
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
  const absl::Status admitted = Admit(*scope, *call, request, context);
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
