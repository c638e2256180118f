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
class ReserveCall : public UnaryCallOf<v1::ReserveRequest, v1::ReserveResponse> {
 public:
  ReserveCall(const CallContext& context, const StreamParts& parts,
              grpc::CallbackServerContext& call, const EncodedMessages& encoded)
      : UnaryCallOf(context, parts, Rpc::kReserve, call, encoded) {}

  void Run(const CallContext& context, std::shared_ptr<Session> session) {
    const absl::Status decoded = Decode();
    if (!decoded.ok()) return End(decoded);
    session_ = std::move(session);
    number_ = request().request();
    End(server::Reserve(context, *session_, request(), &response()));
  }

 protected:
  void Undelivered() override {
    if (session_ != nullptr) WithdrawReserve(*session_, number_, response());
  }

 private:
  uint64_t number_ = 0;  // the request's, which is gone when the response is not delivered
  std::shared_ptr<Session> session_;
};

}  // namespace

grpc::ServerUnaryReactor* CacheService::Reserve(Context* call, const Bytes* in, Bytes* out) {
  const auto reserve =
      std::make_shared<ReserveCall>(context_, parts(), *call, EncodedMessages{*in, *out});
  reserve->Begin();
  CallContext context = context_;
  const absl::Status admitted = Admit(*reserve, *call, context);
  absl::StatusOr<std::shared_ptr<server::Session>> session =
      admitted.ok() ? SessionOf(*call, context) : admitted;
  if (session.ok()) {
    RunInTurn(
        context, reserve->request_bytes(),
        [reserve, context, session = *std::move(session)] { reserve->Run(context, session); },
        [&](const absl::Status& refused) { reserve->End(refused); });
  } else {
    reserve->End(session.status());
  }
  return reserve.get();
}

grpc::ServerUnaryReactor* CacheService::Commit(Context* call, const Bytes* in, Bytes* out) {
  return RespondLater<v1::CommitRequest, v1::CommitResponse>(
      call, Rpc::kCommit, {*in, *out},
      [call](const CallContext& context, const auto& request, auto* response, const Done& done) {
        const auto session = SessionOf(*call, context);
        if (!session.ok()) return done(session.status());
        server::Commit(context, **session, request, response, done);
      });
}

grpc::ServerUnaryReactor* CacheService::Abort(Context* call, const Bytes* in, Bytes* out) {
  return Respond<v1::AbortRequest, v1::AbortResponse>(
      call, Rpc::kAbort, {*in, *out},
      [call](const CallContext& context, const auto& request, auto*) -> absl::Status {
        CRUMB_ASSIGN_OR_RETURN(const auto session, SessionOf(*call, context));
        return server::Abort(context, *session, request);
      });
}

grpc::ServerUnaryReactor* CacheService::ClaimSlots(Context* call, const Bytes* in, Bytes* out) {
  return Respond<v1::ClaimSlotsRequest, v1::ClaimSlotsResponse>(
      call, Rpc::kClaimSlots, {*in, *out},
      [call](const CallContext& context, const auto& request, auto* response) -> absl::Status {
        CRUMB_ASSIGN_OR_RETURN(const auto session, SessionOf(*call, context));
        return server::ClaimSlots(context, *session, request, response);
      });
}

grpc::ServerUnaryReactor* CacheService::ScrubSlots(Context* call, const Bytes* in, Bytes* out) {
  return RespondLater<v1::ScrubSlotsRequest, v1::ScrubSlotsResponse>(
      call, Rpc::kScrubSlots, {*in, *out},
      [call](const CallContext& context, const auto& request, auto* response, const Done& done) {
        const auto session = SessionOf(*call, context);
        if (!session.ok()) return done(session.status());
        RunOnControl(
            context,
            [context, session = *session, &request, response] {
              return server::ScrubSlots(context, *session, request, response);
            },
            done);
      });
}

}  // namespace crumb::server
