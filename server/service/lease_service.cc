// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
// CacheService: the calls about leases.
#include <optional>

#include "common/status_macros.h"
#include "server/calls/lease_calls.h"
#include "server/service/cache_service.h"
#include "server/service/call_metadata.h"
#include "server/service/unary_call.h"

namespace crumb::server {
namespace {

// One Acquire. Its lease is given back if the caller does not get the response.
class AcquireCall : public UnaryCall {
 public:
  AcquireCall(const CallContext& context, const StreamParts& parts,
              grpc::CallbackServerContext& call, v1::AcquireResponse& response)
      : UnaryCall(context, parts, Rpc::kAcquire, call, response),
        service_(context),
        call_(call),
        response_(response) {}

  void Start(const CallContext& context, std::shared_ptr<Session> session,
             const v1::AcquireRequest& request) {
    context_.emplace(context);
    session_ = std::move(session);
    server::Acquire(*context_, session_, DeadlineOf(call_, service_.clock.Now()), request,
                    &response_, [this](const absl::Status& status) { End(status); });
  }

 protected:
  void Undelivered() override {
    if (session_ != nullptr && response_.lease() != 0) {
      service_.sessions.Release(*session_, response_.lease());
    }
  }

 private:
  const CallContext& service_;
  const grpc::CallbackServerContext& call_;
  v1::AcquireResponse& response_;
  std::optional<CallContext> context_;  // the context of this call, with its caller
  std::shared_ptr<Session> session_;
};

}  // namespace

grpc::ServerUnaryReactor* CacheService::Acquire(Context* call, const v1::AcquireRequest* request,
                                                v1::AcquireResponse* response) {
  const auto acquire = std::make_shared<AcquireCall>(context_, parts(), *call, *response);
  acquire->Begin();
  CallContext context = context_;
  const absl::Status admitted = Admit(acquire->scope(), *call, request, context);
  absl::StatusOr<std::shared_ptr<server::Session>> session =
      admitted.ok() ? SessionOf(*call, context) : admitted;
  if (session.ok()) {
    acquire->SetTenant(context.caller.name());
    RunInTurn(
        context, request->ByteSizeLong(),
        [acquire, context, session = *std::move(session), request] {
          acquire->Start(context, session, *request);
        },
        [&](const absl::Status& refused) { acquire->End(refused); });
  } else {
    acquire->End(session.status());
  }
  return acquire.get();
}

grpc::ServerUnaryReactor* CacheService::Lookup(Context* call, const v1::LookupRequest* request,
                                               v1::LookupResponse* response) {
  return RespondLater(
      call, Rpc::kLookup, *request, response, [=](const CallContext& context, const Done& done) {
        server::Lookup(context, DeadlineOf(*call, context.clock.Now()), *request, response, done);
      });
}

grpc::ServerUnaryReactor* CacheService::Release(Context* call, const v1::ReleaseRequest* request,
                                                v1::ReleaseResponse* response) {
  return Respond(call, Rpc::kRelease, *request, response,
                 [=](const CallContext& context) -> absl::Status {
                   CRUMB_ASSIGN_OR_RETURN(const auto session, SessionOf(*call, context));
                   return server::Release(context, *session, *request, response);
                 });
}

grpc::ServerUnaryReactor* CacheService::Prefetch(Context* call, const v1::PrefetchRequest* request,
                                                 v1::PrefetchResponse* response) {
  return Respond(call, Rpc::kPrefetch, *request, response, [=](const CallContext& context) {
    return server::Prefetch(context, *request, response);
  });
}

}  // namespace crumb::server
