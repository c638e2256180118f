// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
// CacheService: the calls about staging memory and slots of device pools.
#include "common/status_macros.h"
#include "server/calls/device_calls.h"
#include "server/calls/staging_calls.h"
#include "server/service/cache_service.h"
#include "server/service/call_metadata.h"

namespace crumb::server {

grpc::ServerUnaryReactor* CacheService::Reserve(Context* call, const v1::ReserveRequest* request,
                                                v1::ReserveResponse* response) {
  return Answer(call, Rpc::kReserve, *request, response,
                [&](const CallContext& context) -> absl::Status {
                  CRUMB_ASSIGN_OR_RETURN(const auto session, SessionOf(*call, context));
                  return server::Reserve(context, *session, *request, response);
                });
}

grpc::ServerUnaryReactor* CacheService::Commit(Context* call, const v1::CommitRequest* request,
                                               v1::CommitResponse* response) {
  return AnswerLater(call, Rpc::kCommit, *request, response,
                     [&](const CallContext& context, const Done& done) {
                       auto session = SessionOf(*call, context);
                       if (!session.ok()) return done(session.status());
                       server::Commit(context, *std::move(session), *request, response, done);
                     });
}

grpc::ServerUnaryReactor* CacheService::Abort(Context* call, const v1::AbortRequest* request,
                                              v1::AbortResponse* response) {
  return Answer(call, Rpc::kAbort, *request, response,
                [&](const CallContext& context) -> absl::Status {
                  CRUMB_ASSIGN_OR_RETURN(const auto session, SessionOf(*call, context));
                  return server::Abort(context, *session, *request);
                });
}

grpc::ServerUnaryReactor* CacheService::ClaimSlots(Context* call,
                                                   const v1::ClaimSlotsRequest* request,
                                                   v1::ClaimSlotsResponse* response) {
  return Answer(call, Rpc::kClaimSlots, *request, response,
                [&](const CallContext& context) -> absl::Status {
                  CRUMB_ASSIGN_OR_RETURN(const auto session, SessionOf(*call, context));
                  return server::ClaimSlots(context, *session, *request, response);
                });
}

grpc::ServerUnaryReactor* CacheService::ScrubSlots(Context* call,
                                                   const v1::ScrubSlotsRequest* request,
                                                   v1::ScrubSlotsResponse* response) {
  return AnswerLater(call, Rpc::kScrubSlots, *request, response,
                     [&](const CallContext& context, const Done& done) {
                       const auto session = SessionOf(*call, context);
                       if (!session.ok()) return done(session.status());
                       RunOnControl(
                           context,
                           [context, session = *session, request, response] {
                             return server::ScrubSlots(context, *session, *request, response);
                           },
                           done);
                     });
}

}  // namespace crumb::server
