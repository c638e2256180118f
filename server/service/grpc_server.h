// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "server/calls/call_context.h"
#include "server/calls/status_calls.h"
#include "server/service/listen_options.h"

namespace crumb::server {

// gRPC's listeners with CacheService, PeerService if there is a cluster, health and reflection.
// gRPC's threads run the handlers. The daemon owns it and starts it when all parts that calls use
// are there. Not thread-safe, but calls go on while its functions run.
class GrpcServer {
 public:
  // Starts to serve. kAlreadyExists: a socket or port is in use; kNotFound: the folder of the Unix
  // socket is missing. The objects that `context` refers to must outlive this.
  static absl::StatusOr<std::unique_ptr<GrpcServer>> Start(const ListenOptions& options,
                                                           const CallContext& context,
                                                           const NodeInfo& node);
  virtual ~GrpcServer() = default;

  // "HOST:PORT" with the real port; empty without TCP.
  virtual std::string tcp_address() const = 0;

  // Sets the state that the health service reports for the server and for CacheService.
  virtual void SetServing(bool serving) = 0;

  // Ends long streams, and calls whose callers leave responses unread; waits `grace` for other
  // calls in progress, then cancels them and ends all connections. No peer can make it last longer.
  // Idempotent.
  virtual void Stop(Duration grace) = 0;
};

// Redirects gRPC's log to crumbd's log, at most one line a second, and counts TLS handshakes that
// fail, which gRPC reports only there. Affects the whole process. Thread-safe, idempotent.
void TakeGrpcLog();

// Returns the handshakes that failed since TakeGrpcLog, of callers and of connections to other
// nodes.
uint64_t TlsHandshakeFailures();

}  // namespace crumb::server
