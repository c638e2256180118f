// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "client/rpc/pending_call.h"
#include "common/clock.h"
#include "common/mutex.h"
#include "common/unique_fd.h"
#include "crumb/v1/cache_service.pb.h"
#include "crumb/v1/call_socket.pb.h"

namespace crumb::client {

// CallSocket carries Acquires over a session's Unix socket instead of gRPC, so that no request
// waits for gRPC's threads: the calling thread sends and receives by itself. One request is in
// flight at a time. Thread-safe.
class CallSocket {
 public:
  explicit CallSocket(UniqueFd socket) : socket_(std::move(socket)) {}

  // Flags of a response besides its message.
  struct ResponseFlags {
    bool fragments_apart = false;  // see SocketAnswer in call_socket.proto
  };

  // Sends the request and returns without waiting. The socket, `response` and `flags` must outlive
  // the result. Returns null if the caller has to use gRPC: another request is in flight, this one
  // is too large, or crumbd has closed the socket.
  std::unique_ptr<PendingCall> Start(const v1::AcquireRequest& request, TimePoint deadline,
                                     v1::AcquireResponse* response, ResponseFlags* flags);

 private:
  class SocketCall;

  // Receives the response with this number and discards responses to abandoned requests. Does not
  // wait if `deadline` has passed. kDeadlineExceeded: not yet received; kUnavailable: the socket is
  // closed or out of step.
  absl::Status Receive(uint64_t number, TimePoint deadline, v1::SocketAnswer* answer);
  void NoteClosed();
  void NoteEnded();

  const UniqueFd socket_;
  std::string buffer_;  // belongs to the caller whose request is in flight
  Mutex mutex_;
  bool in_flight_ ABSL_GUARDED_BY(mutex_) = false;
  bool closed_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace crumb::client
