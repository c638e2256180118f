// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <vector>

#include "common/clock.h"
#include "common/unique_fd.h"
#include "crumb/v1/session.pb.h"
#include "server/session/session.h"

namespace crumb::server {

// Descriptors of a pool are shared with the responses that carry them, so that a response takes
// none of its own.
using SharedFd = std::shared_ptr<const UniqueFd>;

// The response to a PoolRequest, and the descriptors that are sent with it.
struct PoolReply {
  v1::PoolResponse response;
  std::vector<SharedFd> fds;
};

// Serves the messages about device pools that processes send over their sockets. Thread-safe.
class PoolPlane {
 public:
  virtual ~PoolPlane() = default;

  // Returns false if every request is refused.
  virtual bool enabled() const = 0;
  // Serves a message of the session's process. Errors are in the response. Makes system calls on
  // `fds`, and closes those that it does not keep: the caller's thread must be one that this
  // process may hold up.
  virtual PoolReply Handle(const std::shared_ptr<Session>& session, const v1::PoolRequest& request,
                           std::vector<UniqueFd> fds) = 0;
  // Gives up pools whose time is over, and ends recoveries, on other threads. Returns when to call
  // it again. Does not block.
  virtual TimePoint Check() = 0;
};

}  // namespace crumb::server
