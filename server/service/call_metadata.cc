// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "server/service/call_metadata.h"

#include <chrono>
#include <string_view>

#include "common/hex.h"

namespace crumb::server {
namespace {

// The way back over a local socket.
constexpr auto kResponseMargin = std::chrono::milliseconds(1);

constexpr std::string_view kScheme = "Bearer ";

absl::StatusOr<std::shared_ptr<Session>> FindSession(const grpc::CallbackServerContext& call,
                                                     const SessionTable& sessions) {
  const auto found = call.client_metadata().find(kSessionMetadata);
  RandomId token;
  if (found == call.client_metadata().end() ||
      !HexDecode(std::string_view(found->second.data(), found->second.size()), token.bytes)) {
    return absl::UnauthenticatedError("metadata crumb-session must hold 32 hexadecimal digits");
  }
  auto session = sessions.Find(token.view());
  if (session == nullptr) {
    return absl::UnauthenticatedError("unknown session: it ended, or crumbd was restarted");
  }
  return session;
}

}  // namespace

absl::StatusOr<Caller> CallerOf(const grpc::CallbackServerContext& call,
                                const CallContext& context) {
  if (context.tenants == nullptr) return Caller();
  const auto found = call.client_metadata().find(kTokenMetadata);
  if (found != call.client_metadata().end()) {
    const std::string_view value(found->second.data(), found->second.size());
    if (!value.starts_with(kScheme)) {
      return context.tenants->Refuse(AuthFailure::kUnknown,
                                     "metadata authorization must be 'Bearer TOKEN'");
    }
    return context.tenants->Authenticate(value.substr(kScheme.size()));
  }
  if (call.peer().starts_with("unix:")) {
    const auto session = FindSession(call, context.sessions);
    if (session.ok() && (*session)->engine().tenant().empty()) return Caller();
  }
  return context.tenants->Refuse(
      AuthFailure::kMissing,
      "the call needs a tenant's token, metadata authorization: tenants.file is set");
}

absl::StatusOr<std::shared_ptr<Session>> SessionOf(const grpc::CallbackServerContext& call,
                                                   const CallContext& context) {
  auto session = FindSession(call, context.sessions);
  if (!session.ok() || (*session)->engine().tenant() == context.caller.name()) return session;
  const std::string what = "the session was opened with another tenant's token";
  if (context.tenants == nullptr) return absl::UnauthenticatedError(what);
  return context.tenants->Refuse(AuthFailure::kSession, what);
}

TimePoint DeadlineOf(const grpc::CallbackServerContext& call, TimePoint now) {
  const auto deadline = call.deadline();
  if (deadline == std::chrono::system_clock::time_point::max()) return TimePoint::max();
  const auto left = deadline - std::chrono::system_clock::now() - kResponseMargin;
  // Far deadlines would overflow the sum.
  if (left > std::chrono::hours(24)) return TimePoint::max();
  return now + std::chrono::duration_cast<Duration>(left);
}

}  // namespace crumb::server
