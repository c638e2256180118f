// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>

#include "crumb/v1/cache_service.pb.h"
#include "grpcpp/support/server_callback.h"
#include "server/calls/call_context.h"
#include "server/service/stream_parts.h"

namespace crumb::server {

// Starts one Put, or ends it with `admitted`. The next message is read only when the fragment
// before it is committed, so that a stream holds one fragment. A caller who sends neither a whole
// fragment nor a mebibyte for limits.stream_progress_timeout gets kDeadlineExceeded.
grpc::ServerReadReactor<v1::PutRequest>* StartPut(
    const CallContext& context, const absl::Status& admitted, const StreamParts& parts,
    std::unique_ptr<CallScope> scope, grpc::CallbackServerContext& call, v1::PutResponse* response);

}  // namespace crumb::server
