// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>

#include "grpcpp/support/byte_buffer.h"
#include "grpcpp/support/server_callback.h"
#include "server/calls/call_context.h"
#include "server/service/call_scope.h"

namespace crumb::server {

// Starts one Get, or ends it with `admitted`. Messages are encoded here, so that tiles go from the
// store's memory to the wire without a copy.
grpc::ServerWriteReactor<grpc::ByteBuffer>* StartGet(
    const CallContext& context, const absl::Status& admitted, CallsInProgress& calls,
    std::unique_ptr<CallScope> scope, TimePoint deadline, const grpc::ByteBuffer& request);

}  // namespace crumb::server
