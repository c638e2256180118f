// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "server/service/cache_service.h"

#include <utility>

#include "server/service/call_metadata.h"
#include "server/service/get_stream.h"
#include "server/service/grpc_status.h"
#include "server/service/put_stream.h"
#include "server/service/session_stream.h"
#include "server/service/watch_stream.h"

namespace crumb::server {

grpc::ServerUnaryReactor* CacheService::Answer(Context* call_context, Rpc rpc,
                                               const std::function<absl::Status()>& call) {
  CallScope scope(context_, calls_, rpc);
  absl::Status status = scope.Admit();
  if (status.ok()) status = call();
  scope.SetCode(status.code());
  Unary* reactor = call_context->DefaultReactor();
  reactor->Finish(ToGrpc(status));
  return reactor;
}

grpc::ServerUnaryReactor* CacheService::AnswerLater(Context* call_context, Rpc rpc,
                                                    const std::function<void(Done)>& call) {
  Unary* reactor = call_context->DefaultReactor();
  const std::shared_ptr<CallScope> scope = NewScope(rpc);
  const Done done = [reactor, scope](const absl::Status& status) {
    scope->SetCode(status.code());
    reactor->Finish(ToGrpc(status));
  };
  const absl::Status admitted = scope->Admit();
  if (admitted.ok()) {
    call(done);
  } else {
    done(admitted);
  }
  return reactor;
}

grpc::ServerWriteReactor<grpc::ByteBuffer>* CacheService::Get(Context* call,
                                                              const grpc::ByteBuffer* request) {
  return StartGet(context_, calls_, NewScope(Rpc::kGet), DeadlineOf(*call, context_.clock.Now()),
                  *request);
}

grpc::ServerReadReactor<v1::PutRequest>* CacheService::Put(Context*, v1::PutResponse* response) {
  return StartPut(context_, calls_, NewScope(Rpc::kPut), response);
}

grpc::ServerWriteReactor<v1::WatchEventsResponse>* CacheService::WatchEvents(
    Context*, const v1::WatchEventsRequest* request) {
  return StartWatch(context_, streams_, NewScope(Rpc::kWatchEvents), *request);
}

grpc::ServerBidiReactor<v1::SessionRequest, v1::SessionResponse>* CacheService::Session(
    Context* call) {
  auto session = SessionOf(*call, context_.sessions);
  return StartSessionStream(context_, streams_, NewScope(Rpc::kSession),
                            session.ok() ? *std::move(session) : nullptr);
}

}  // namespace crumb::server
