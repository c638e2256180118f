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
class AcquireCall : public UnaryCallOf<v1::AcquireRequest, v1::AcquireResponse> {
 public:
  AcquireCall(const CallContext& context, const StreamParts& parts,
              grpc::CallbackServerContext& call, const EncodedMessages& encoded)
      : UnaryCallOf(context, parts, Rpc::kAcquire, call, encoded), service_(context), call_(call) {}

  void Start(const CallContext& context, std::shared_ptr<Session> session) {
    const absl::Status decoded = Decode();
    if (!decoded.ok()) return End(decoded);
    context_.emplace(context);
    session_ = std::move(session);
    server::Acquire(*context_, session_, DeadlineOf(call_, service_.clock.Now()), request(),
                    &response(), [this](const absl::Status& status) { End(status); });
  }

 protected:
  void Undelivered() override {
    if (session_ != nullptr && response().lease() != 0) {
      service_.sessions.Release(*session_, response().lease());
    }
  }

 private:
  const CallContext& service_;
  const grpc::CallbackServerContext& call_;
  std::optional<CallContext> context_;  // the context of this call, with its caller
  std::shared_ptr<Session> session_;
};

}  // namespace

grpc::ServerUnaryReactor* CacheService::Acquire(Context* call, const Bytes* in, Bytes* out) {
  const auto acquire =
      std::make_shared<AcquireCall>(context_, parts(), *call, EncodedMessages{*in, *out});
  acquire->Begin();
  CallContext context = context_;
  const absl::Status admitted = Admit(*acquire, *call, context);
  absl::StatusOr<std::shared_ptr<server::Session>> session =
      admitted.ok() ? SessionOf(*call, context) : admitted;
  if (session.ok()) {
    RunInTurn(
        context, acquire->request_bytes(),
        [acquire, context, session = *std::move(session)] { acquire->Start(context, session); },
        [&](const absl::Status& refused) { acquire->End(refused); });
  } else {
    acquire->End(session.status());
  }
  return acquire.get();
}

grpc::ServerUnaryReactor* CacheService::Lookup(Context* call, const Bytes* in, Bytes* out) {
  return RespondLater<v1::LookupRequest, v1::LookupResponse>(
      call, Rpc::kLookup, {*in, *out},
      [call](const CallContext& context, const auto& request, auto* response, const Done& done) {
        server::Lookup(context, DeadlineOf(*call, context.clock.Now()), request, response, done);
      });
}

grpc::ServerUnaryReactor* CacheService::Release(Context* call, const Bytes* in, Bytes* out) {
  return Respond<v1::ReleaseRequest, v1::ReleaseResponse>(
      call, Rpc::kRelease, {*in, *out},
      [call](const CallContext& context, const auto& request, auto* response) -> absl::Status {
        CRUMB_ASSIGN_OR_RETURN(const auto session, SessionOf(*call, context));
        return server::Release(context, *session, request, response);
      });
}

grpc::ServerUnaryReactor* CacheService::Prefetch(Context* call, const Bytes* in, Bytes* out) {
  return Respond<v1::PrefetchRequest, v1::PrefetchResponse>(
      call, Rpc::kPrefetch, {*in, *out},
      [](const CallContext& context, const auto& request, auto* response) {
        return server::Prefetch(context, request, response);
      });
}

}  // namespace crumb::server
