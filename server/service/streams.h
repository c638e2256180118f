// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "crumb/v1/cache_service.pb.h"
#include "crumb/v1/session.pb.h"
#include "grpcpp/support/byte_buffer.h"
#include "grpcpp/support/server_callback.h"
#include "server/calls/call_context.h"
#include "server/calls/call_scope.h"
#include "server/service/stall_watch.h"
#include "server/service/stream_registry.h"

// The streams of CacheService, each in a source of its own (get_stream.cc and so on).
namespace crumb::server {

// The parts of the service that a Put or Get works with; they outlive the stream.
struct StreamParts {
  CallsInProgress& calls;
  StallWatch& stalls;
};

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

// Starts one Put, or ends it with `admitted`. The next message is read only when the fragment
// before it is committed, so that a stream holds one fragment. A caller who sends neither a whole
// fragment nor a mebibyte for limits.stream_progress_timeout gets kDeadlineExceeded.
grpc::ServerReadReactor<v1::PutRequest>* StartPut(
    const CallContext& context, const absl::Status& admitted, const StreamParts& parts,
    std::unique_ptr<CallScope> scope, grpc::CallbackServerContext& call, v1::PutResponse* response);

// Starts the stream of `session`, or ends it with its error. A caller that does not read a notice
// for limits.stream_progress_timeout loses the stream; a stream without notices stays.
grpc::ServerBidiReactor<v1::SessionRequest, v1::SessionResponse>* StartSessionStream(
    const CallContext& context, StreamRegistry& streams, StallWatch& stalls,
    std::unique_ptr<CallScope> scope, grpc::CallbackServerContext& call,
    absl::StatusOr<std::shared_ptr<Session>> session);

// Starts one WatchEvents, or ends it with `admitted`. A caller that does not read its events for
// limits.stream_progress_timeout loses the stream.
grpc::ServerWriteReactor<v1::WatchEventsResponse>* StartWatch(
    const CallContext& context, const absl::Status& admitted, StreamRegistry& streams,
    StallWatch& stalls, std::unique_ptr<CallScope> scope, grpc::CallbackServerContext& call,
    const v1::WatchEventsRequest& request);

}  // namespace crumb::server
