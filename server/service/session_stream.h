// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "crumb/v1/session.pb.h"
#include "grpcpp/support/server_callback.h"
#include "server/calls/call_context.h"
#include "server/service/call_scope.h"
#include "server/service/stream_registry.h"

namespace crumb::server {

// Starts the stream of `session`, or ends it with its error.
grpc::ServerBidiReactor<v1::SessionRequest, v1::SessionResponse>* StartSessionStream(
    const CallContext& context, StreamRegistry& streams, std::unique_ptr<CallScope> scope,
    absl::StatusOr<std::shared_ptr<Session>> session);

}  // namespace crumb::server
