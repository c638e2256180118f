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

// The response to a PoolRequest, and the descriptors that are sent with it. An error is a code and
// a text in the response, without descriptors.
struct PoolReply {
  v1::PoolResponse response;
  std::vector<SharedFd> fds;
};

// Serves the messages about device pools that processes send over their sockets. DevicePools in
// server/device implements it; this interface keeps the session folder from including that one.
// PoolRequests calls Handle on a task of the process's user or tenant, and FdListener's thread
// calls Check. Thread-safe.
class PoolPlane {
 public:
  virtual ~PoolPlane() = default;

  // Returns whether there are device pools on this node; if not, every request is refused.
  // Constant.
  virtual bool enabled() const = 0;
  // Serves a message of the session's process. Errors are in the response. Makes system calls on
  // `fds`, and closes those that it does not keep: the caller's thread must be one that this
  // process may hold up.
  virtual PoolReply Handle(const std::shared_ptr<Session>& session, const v1::PoolRequest& request,
                           std::vector<UniqueFd> fds) = 0;
  // Gives up pools whose time is over, and ends recoveries, on other threads. Returns the time at
  // which to call it again, TimePoint::max() if no pool waits for a time. Does not block.
  virtual TimePoint Check() = 0;
};

}  // namespace crumb::server
