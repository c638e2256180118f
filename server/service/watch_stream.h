// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "crumb/v1/cache_service.pb.h"
#include "grpcpp/support/server_callback.h"
#include "server/calls/call_context.h"
#include "server/service/call_scope.h"
#include "server/service/stream_registry.h"

namespace crumb::server {

// Starts one WatchEvents, or ends it with `admitted`.
grpc::ServerWriteReactor<v1::WatchEventsResponse>* StartWatch(
    const CallContext& context, const absl::Status& admitted, StreamRegistry& streams,
    std::unique_ptr<CallScope> scope, const v1::WatchEventsRequest& request);

}  // namespace crumb::server
