// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
// CacheService: the calls about staging memory and slots of device pools.
#include <memory>
#include <utility>

#include "common/status_macros.h"
#include "server/calls/device_calls.h"
#include "server/calls/staging_calls.h"
#include "server/service/cache_service.h"
#include "server/service/call_metadata.h"
#include "server/service/unary_call.h"

namespace crumb::server {
namespace {

// One Reserve. Its room is given back if the caller does not get the response.
class ReserveCall : public UnaryCall {
 public:
  ReserveCall(const CallContext& context, const StreamParts& parts,
              grpc::CallbackServerContext& call, const v1::ReserveRequest& request,
              v1::ReserveResponse& response)
      : UnaryCall(context, parts, Rpc::kReserve, call, response),
        request_(request),
        response_(response) {}

  void Run(const CallContext& context, std::shared_ptr<Session> session) {
    session_ = std::move(session);
    End(server::Reserve(context, *session_, request_, &response_));
  }

 protected:
  void Undelivered() override {
    if (session_ != nullptr) WithdrawReserve(*session_, request_, response_);
  }

 private:
  const v1::ReserveRequest& request_;
  v1::ReserveResponse& response_;
  std::shared_ptr<Session> session_;
};

}  // namespace

grpc::ServerUnaryReactor* CacheService::Reserve(Context* call, const v1::ReserveRequest* request,
                                                v1::ReserveResponse* response) {
  const auto reserve = std::make_shared<ReserveCall>(context_, parts(), *call, *request, *response);
  reserve->Begin();
  CallContext context = context_;
  const absl::Status admitted = Admit(reserve->scope(), *call, request, context);
  absl::StatusOr<std::shared_ptr<server::Session>> session =
      admitted.ok() ? SessionOf(*call, context) : admitted;
  if (session.ok()) {
    reserve->SetTenant(context.caller.name());
    RunInTurn(
        context, request->ByteSizeLong(),
        [reserve, context, session = *std::move(session)] { reserve->Run(context, session); },
        [&](const absl::Status& refused) { reserve->End(refused); });
  } else {
    reserve->End(session.status());
  }
  return reserve.get();
}

grpc::ServerUnaryReactor* CacheService::Commit(Context* call, const v1::CommitRequest* request,
                                               v1::CommitResponse* response) {
  return RespondLater(call, Rpc::kCommit, *request, response,
                      [=](const CallContext& context, const Done& done) {
                        const auto session = SessionOf(*call, context);
                        if (!session.ok()) return done(session.status());
                        server::Commit(context, **session, *request, response, done);
                      });
}

grpc::ServerUnaryReactor* CacheService::Abort(Context* call, const v1::AbortRequest* request,
                                              v1::AbortResponse* response) {
  return Respond(call, Rpc::kAbort, *request, response,
                 [=](const CallContext& context) -> absl::Status {
                   CRUMB_ASSIGN_OR_RETURN(const auto session, SessionOf(*call, context));
                   return server::Abort(context, *session, *request);
                 });
}

grpc::ServerUnaryReactor* CacheService::ClaimSlots(Context* call,
                                                   const v1::ClaimSlotsRequest* request,
                                                   v1::ClaimSlotsResponse* response) {
  return Respond(call, Rpc::kClaimSlots, *request, response,
                 [=](const CallContext& context) -> absl::Status {
                   CRUMB_ASSIGN_OR_RETURN(const auto session, SessionOf(*call, context));
                   return server::ClaimSlots(context, *session, *request, response);
                 });
}

grpc::ServerUnaryReactor* CacheService::ScrubSlots(Context* call,
                                                   const v1::ScrubSlotsRequest* request,
                                                   v1::ScrubSlotsResponse* response) {
  return RespondLater(call, Rpc::kScrubSlots, *request, response,
                      [=](const CallContext& context, const Done& done) {
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
