// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "crumb/v1/cache_service.pb.h"
#include "grpcpp/support/server_callback.h"
#include "server/calls/call_context.h"
#include "server/service/call_scope.h"
#include "server/service/stall_watch.h"
#include "server/service/stream_registry.h"

namespace crumb::server {

// Starts one WatchEvents, or ends it with `admitted`. A caller that does not read its events for
// limits.stream_progress_timeout loses the stream.
grpc::ServerWriteReactor<v1::WatchEventsResponse>* StartWatch(
    const CallContext& context, const absl::Status& admitted, StreamRegistry& streams,
    StallWatch& stalls, std::unique_ptr<CallScope> scope, grpc::CallbackServerContext& call,
    const v1::WatchEventsRequest& request);

}  // namespace crumb::server
