// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "common/clock.h"
#include "grpcpp/server_context.h"
#include "server/session/session_table.h"

namespace crumb::server {

// Carries a session's token, as hexadecimal.
inline constexpr char kSessionMetadata[] = "crumb-session";

// The session whose token the call carries. kUnauthenticated: none, or an unknown one.
absl::StatusOr<std::shared_ptr<Session>> SessionOf(const grpc::CallbackServerContext& call,
                                                   const SessionTable& sessions);

// The call's deadline on the monotonic clock, a little early so that the answer still arrives.
TimePoint DeadlineOf(const grpc::CallbackServerContext& call, TimePoint now);

}  // namespace crumb::server
