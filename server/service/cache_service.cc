// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "server/service/cache_service.h"

#include <utility>

#include "common/status_macros.h"
#include "server/service/call_metadata.h"

namespace crumb::server {
namespace {

// Takes the request out of gRPC's hands, which would keep it until its caller has read the last
// message or the status.
v1::WatchEventsRequest Take(const v1::WatchEventsRequest& request) {
  v1::WatchEventsRequest taken;
  taken.Swap(&const_cast<v1::WatchEventsRequest&>(request));
  return taken;
}

}  // namespace

absl::Status CacheService::Admit(CallScope& scope, const Context& call, CallContext& context,
                                 size_t request_bytes) const {
  CRUMB_ASSIGN_OR_RETURN(context.caller, CallerOf(call, context));
  return scope.Admit(context.caller.name(), CountedBytes(request_bytes));
}

absl::Status CacheService::Admit(UnaryCall& unary, const Context& call,
                                 CallContext& context) const {
  CRUMB_ASSIGN_OR_RETURN(context.caller, CallerOf(call, context));
  return unary.Admit(context.caller.name());
}

grpc::ServerWriteReactor<grpc::ByteBuffer>* CacheService::Get(Context* call, const Bytes* request) {
  auto scope = NewScope(Rpc::kGet);
  CallContext context = context_;
  const absl::Status admitted = Admit(*scope, *call, context, request->Length());
  return StartGet(context, admitted, parts(), std::move(scope), *call, *request);
}

grpc::ServerReadReactor<v1::PutRequest>* CacheService::Put(Context* call,
                                                           v1::PutResponse* response) {
  auto scope = NewScope(Rpc::kPut);
  CallContext context = context_;
  const absl::Status admitted = Admit(*scope, *call, context);
  return StartPut(context, admitted, parts(), std::move(scope), *call, response);
}

grpc::ServerWriteReactor<v1::WatchEventsResponse>* CacheService::WatchEvents(
    Context* call, const v1::WatchEventsRequest* request) {
  auto scope = NewScope(Rpc::kWatchEvents);
  CallContext context = context_;
  const v1::WatchEventsRequest taken = Take(*request);
  absl::Status admitted = Admit(*scope, *call, context);
  if (admitted.ok()) admitted = CheckFields(context.limits, taken);
  return StartWatch(context, admitted, streams_, stalls_, std::move(scope), *call, taken);
}

grpc::ServerBidiReactor<v1::SessionRequest, v1::SessionResponse>* CacheService::Session(
    Context* call) {
  auto scope = NewScope(Rpc::kSession);
  CallContext context = context_;
  const absl::Status admitted = Admit(*scope, *call, context);
  return StartSessionStream(context, streams_, stalls_, std::move(scope), *call,
                            admitted.ok() ? SessionOf(*call, context) : admitted);
}

}  // namespace crumb::server
