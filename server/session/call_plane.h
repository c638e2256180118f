// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "common/unique_fd.h"
#include "server/base/owner_tasks.h"
#include "server/session/session.h"

namespace crumb::server {

// Serves the calls of sessions that go over a socket of their own. The interface lies here because
// the session folder does not know the calls' logic; CallSockets in server/calls implements it, and
// FdListener, which opens and closes the sockets with their sessions, is its only user.
// Thread-safe.
//
// A socket of its own spares such calls gRPC's threads, see docs/adr/0014. `number` names an open
// socket to Close.
class CallPlane {
 public:
  // A socket that Open has made.
  struct Opened {
    // Number of the socket, from 1 and never used twice; 0: none was opened.
    uint64_t number = 0;
    UniqueFd socket;  // the process's end
  };

  virtual ~CallPlane() = default;

  // Serves the session's calls until Close, or until the process closes its end. The process may
  // send descriptors whose close blocks, so `closing` closes them, and this end with its unread
  // messages, as tasks of `owner`. kUnavailable: crumbd is stopping; errors of making the pair of
  // sockets are passed on.
  virtual absl::StatusOr<Opened> Open(std::shared_ptr<Session> session,
                                      std::shared_ptr<OwnerTasks> closing, std::string owner) = 0;
  // Stops serving a socket and shuts it down. Calls in progress go on, and their responses are
  // dropped. Ignores numbers that are not open.
  virtual void Close(uint64_t number) = 0;
};

}  // namespace crumb::server
