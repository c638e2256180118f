// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
// CacheService: the calls about leases.
#include "common/status_macros.h"
#include "server/calls/lease_calls.h"
#include "server/service/cache_service.h"
#include "server/service/call_metadata.h"
#include "server/service/grpc_status.h"

namespace crumb::server {
namespace {

// One Acquire; gives the lease back when the caller has gone without its answer.
class AcquireReactor : public grpc::ServerUnaryReactor {
 public:
  AcquireReactor(const CallContext& context, const grpc::CallbackServerContext& call,
                 const v1::AcquireResponse& response, std::unique_ptr<CallScope> scope)
      : context_(context), call_(call), response_(response), scope_(std::move(scope)) {}

  void Start(std::shared_ptr<Session> session, const v1::AcquireRequest& request,
             v1::AcquireResponse* response) {
    session_ = std::move(session);
    server::Acquire(context_, session_, DeadlineOf(call_, context_.clock.Now()), request, response,
                    [this](const absl::Status& status) { End(status); });
  }

  void End(const absl::Status& status) {
    scope_->SetCode(status.code());
    scope_.reset();  // the call's time ends here, not when gRPC is done with it
    Finish(ToGrpc(status));
  }

  void OnDone() override {
    if (session_ != nullptr && response_.lease() != 0 && call_.IsCancelled()) {
      context_.sessions.Release(*session_, response_.lease());
    }
    delete this;
  }

 private:
  const CallContext context_;
  const grpc::CallbackServerContext& call_;
  const v1::AcquireResponse& response_;
  std::unique_ptr<CallScope> scope_;
  std::shared_ptr<Session> session_;
};

}  // namespace

grpc::ServerUnaryReactor* CacheService::Acquire(Context* call, const v1::AcquireRequest* request,
                                                v1::AcquireResponse* response) {
  auto scope = NewScope(Rpc::kAcquire);
  CallContext context = context_;
  // server::Acquire checks the request itself.
  const absl::Status admitted = Admit(*scope, *call, /*request=*/nullptr, context);
  absl::StatusOr<std::shared_ptr<server::Session>> session =
      admitted.ok() ? SessionOf(*call, context) : admitted;
  // Deletes itself in OnDone.
  auto* reactor = new AcquireReactor(context, *call, *response, std::move(scope));
  if (session.ok()) {
    reactor->Start(*std::move(session), *request, response);
  } else {
    reactor->End(session.status());
  }
  return reactor;
}

grpc::ServerUnaryReactor* CacheService::Lookup(Context* call, const v1::LookupRequest* request,
                                               v1::LookupResponse* response) {
  return AnswerLater(
      call, Rpc::kLookup, *request, [&](const CallContext& context, const Done& done) {
        server::Lookup(context, DeadlineOf(*call, context.clock.Now()), *request, response, done);
      });
}

grpc::ServerUnaryReactor* CacheService::Release(Context* call, const v1::ReleaseRequest* request,
                                                v1::ReleaseResponse* response) {
  return Answer(call, Rpc::kRelease, *request, [&](const CallContext& context) -> absl::Status {
    CRUMB_ASSIGN_OR_RETURN(const auto session, SessionOf(*call, context));
    return server::Release(context, *session, *request, response);
  });
}

grpc::ServerUnaryReactor* CacheService::Prefetch(Context* call, const v1::PrefetchRequest* request,
                                                 v1::PrefetchResponse* response) {
  return Answer(call, Rpc::kPrefetch, *request, [&](const CallContext& context) {
    return server::Prefetch(context, *request, response);
  });
}

}  // namespace crumb::server
