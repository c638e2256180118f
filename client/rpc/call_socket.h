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

// A session's socket for questions that shall not wait for gRPC's threads: the caller sends and
// receives by itself. One question at a time. Thread-safe.
class CallSocket {
 public:
  explicit CallSocket(UniqueFd socket) : socket_(std::move(socket)) {}

  // What an answer brings besides.
  struct ResponseFlags {
    bool fragments_apart = false;  // see SocketAnswer
  };

  // Sends and returns; this and the places of the answer must outlive the result. Null: to be
  // asked over gRPC, because another question is under way, it is too large, or crumbd has closed
  // the socket.
  std::unique_ptr<PendingCall> Start(const v1::AcquireRequest& request, TimePoint deadline,
                                     v1::AcquireResponse* response, ResponseFlags* flags);

 private:
  class SocketCall;

  // The answer to `number`, without waiting if `deadline` has passed; drops those to others, which
  // nobody waits for any more. kDeadlineExceeded; kUnavailable: the socket is of no use any more.
  absl::Status Receive(uint64_t number, TimePoint deadline, v1::SocketAnswer* answer);
  void NoteClosed();
  void NoteEnded();

  const UniqueFd socket_;
  std::string buffer_;  // of who has asked
  Mutex mutex_;
  bool in_flight_ ABSL_GUARDED_BY(mutex_) = false;
  bool closed_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace crumb::client
