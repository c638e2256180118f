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

// Serves the calls of sessions that go over a socket of their own. Thread-safe.
//
// It spares such calls gRPC's threads, see docs/adr/0014. `number` names an open socket to Close.
class CallPlane {
 public:
  struct Opened {
    uint64_t number = 0;
    UniqueFd socket;  // the process's end
  };

  virtual ~CallPlane() = default;

  // Serves the session's calls until Close, or until the process closes its end. The process may
  // send descriptors whose close blocks, so `closing` closes them, and this end with its unread
  // messages, as tasks of `owner`.
  virtual absl::StatusOr<Opened> Open(std::shared_ptr<Session> session,
                                      std::shared_ptr<OwnerTasks> closing, std::string owner) = 0;
  // Calls in progress go on, and their responses are dropped. Ignores numbers that are not open.
  virtual void Close(uint64_t number) = 0;
};

}  // namespace crumb::server
