// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "common/clock.h"
#include "grpcpp/server_context.h"
#include "server/calls/call_context.h"
#include "server/session/session_table.h"

namespace crumb::server {

// Carries a session's token, as hexadecimal.
inline constexpr char kSessionMetadata[] = "crumb-session";

// Carries a tenant's token, behind "Bearer ".
inline constexpr char kTokenMetadata[] = "authorization";

// Returns the caller by the token in the call's metadata. Without tenants every caller has all
// rights. kUnauthenticated where there are tenants: no token, an unknown or an expired one; on the
// Unix socket a session of crumbd's own user or of root will do instead.
absl::StatusOr<Caller> CallerOf(const grpc::CallbackServerContext& call,
                                const CallContext& context);

// Returns the session whose token the call carries, in any phase but kEnded. kUnauthenticated:
// none, an unknown one, or another tenant's than the caller `context` names.
absl::StatusOr<std::shared_ptr<Session>> SessionOf(const grpc::CallbackServerContext& call,
                                                   const CallContext& context);

// Returns the call's deadline on the monotonic clock, a little early so that the response arrives.
TimePoint DeadlineOf(const grpc::CallbackServerContext& call, TimePoint now);

}  // namespace crumb::server
