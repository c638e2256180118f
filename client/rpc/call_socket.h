// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "client/rpc/pending_call.h"
#include "common/clock.h"
#include "common/mutex.h"
#include "common/unique_fd.h"
#include "crumb/v1/call_socket.pb.h"

namespace crumb::client {

// CallSocket carries calls over a session's Unix socket instead of gRPC, so that no call waits for
// gRPC's threads: the calling thread sends and receives by itself. One call is in flight at a time.
// Thread-safe.
//
// A connection has two: one for Acquire and one for Reserve and Commit, so that a request that
// begins does not wait for pages that are being published. A call is one datagram each way; a
// session without them, or a call that does not fit, uses RpcStub. docs/adr/0014 has the reasons
// and the times.
class CallSocket {
 public:
  explicit CallSocket(UniqueFd socket) : socket_(std::move(socket)) {}

  // Sends `call` with the time that is left, and with a number if it is a Reserve or a Commit; an
  // Acquire has one. Returns without waiting. The socket and `response` must outlive the result;
  // `call` need not. `response` is valid once Finish has returned OK. Returns null if the caller
  // has to use gRPC: another call is in flight, this one is too large for the socket, or crumbd has
  // closed it. The status of Finish is crumbd's. If Finish times out, crumbd may still serve the
  // call: the response is discarded when it arrives, and the caller must have the granted lease or
  // room returned (see Reconnector).
  std::unique_ptr<PendingCall> Start(v1::SocketCall& call, TimePoint deadline,
                                     v1::SocketResponse* response);

 private:
  class SocketCall;

  // Takes the socket for one call. Returns false if another call is in flight or crumbd has closed
  // the socket.
  bool Begin();
  // Receives the response with this number and discards responses to abandoned calls. Does not
  // wait if `deadline` has passed. kDeadlineExceeded: not yet received; kUnavailable: the socket is
  // closed or out of step.
  absl::Status Receive(uint64_t number, TimePoint deadline, v1::SocketResponse* response);
  void NoteClosed();
  void NoteEnded();

  const UniqueFd socket_;
  // These belong to the caller whose call is in flight.
  std::string sent_;                  // the request's bytes
  std::unique_ptr<char[]> received_;  // kCallMessageBytesMax; allocated by the first call
  uint64_t last_number_ = 0;          // number of the last Reserve or Commit

  Mutex mutex_;
  bool in_flight_ ABSL_GUARDED_BY(mutex_) = false;
  bool closed_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace crumb::client
