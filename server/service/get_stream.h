// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>

#include "grpcpp/support/byte_buffer.h"
#include "grpcpp/support/server_callback.h"
#include "server/calls/call_context.h"
#include "server/service/stream_parts.h"

namespace crumb::server {

// Starts one Get, or ends it with `admitted`. Messages are encoded here, so that tiles go from the
// store's memory to the wire without a copy. At most one message of limits.chunk_bytes waits to be
// read; a caller who does not read it for limits.stream_progress_timeout gets CANCELLED: a status
// could not overtake the message.
grpc::ServerWriteReactor<grpc::ByteBuffer>* StartGet(const CallContext& context,
                                                     const absl::Status& admitted,
                                                     const StreamParts& parts,
                                                     std::unique_ptr<CallScope> scope,
                                                     grpc::CallbackServerContext& call,
                                                     const grpc::ByteBuffer& request);

}  // namespace crumb::server
