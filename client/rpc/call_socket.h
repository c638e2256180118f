// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "client/rpc/pending_call.h"
#include "common/clock.h"
#include "common/mutex.h"
#include "common/unique_fd.h"
#include "crumb/v1/cache_service.pb.h"
#include "crumb/v1/call_socket.pb.h"

namespace crumb::client {

// CallSocket carries calls over a session's Unix socket instead of gRPC, so that no call waits for
// gRPC's threads: the calling thread sends and receives by itself. One call is in flight at a time.
// Thread-safe.
class CallSocket {
 public:
  explicit CallSocket(UniqueFd socket) : socket_(std::move(socket)) {}

  // Flags of a response besides its message.
  struct ResponseFlags {
    bool fragments_apart = false;  // see SocketAnswer in call_socket.proto
  };

  // Sends the request and returns without waiting. The socket, the response and `flags` must
  // outlive the result; the request need not. Returns null if the caller has to use gRPC: another
  // call is in flight, this one is too large for the socket, or crumbd has closed it.
  std::unique_ptr<PendingCall> Start(const v1::AcquireRequest& request, TimePoint deadline,
                                     v1::AcquireResponse* response, ResponseFlags* flags);
  std::unique_ptr<PendingCall> Start(const v1::ReserveRequest& request, TimePoint deadline,
                                     v1::ReserveResponse* response);
  std::unique_ptr<PendingCall> Start(const v1::CommitRequest& request, TimePoint deadline,
                                     v1::CommitResponse* response);

 private:
  class SocketCall;
  // Moves the response out of the answer to a call that succeeded.
  using Receiver = std::function<void(v1::SocketAnswer&)>;

  // Takes the socket for one call. Returns false if another call is in flight or crumbd has closed
  // the socket.
  bool Begin();
  // Returns the number of a Reserve or Commit. REQUIRES: Begin returned true for it.
  uint64_t NextNumber() { return ++last_number_; }
  // Sends `call`, which names the answer `number`. REQUIRES: Begin returned true for it.
  std::unique_ptr<PendingCall> Send(v1::SocketCall& call, uint64_t number, TimePoint deadline,
                                    Receiver receiver);
  // Receives the response with this number and discards responses to abandoned calls. Does not
  // wait if `deadline` has passed. kDeadlineExceeded: not yet received; kUnavailable: the socket is
  // closed or out of step.
  absl::Status Receive(uint64_t number, TimePoint deadline, v1::SocketAnswer* answer);
  void NoteClosed();
  void NoteEnded();

  const UniqueFd socket_;
  // These belong to the caller whose call is in flight.
  std::string sent_;                  // the request's bytes
  std::unique_ptr<char[]> received_;  // kCallMessageBytesMax; allocated by the first call
  uint64_t last_number_ = 0;

  Mutex mutex_;
  bool in_flight_ ABSL_GUARDED_BY(mutex_) = false;
  bool closed_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace crumb::client
