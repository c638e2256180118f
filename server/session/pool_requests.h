// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <memory>
#include <string>
#include <utility>

#include "common/fd_channel.h"
#include "server/base/owner_tasks.h"
#include "server/metrics/server_metrics.h"
#include "server/session/pool_plane.h"
#include "server/session/unread_descriptors.h"

namespace crumb::server {

// Serves the PoolRequests that processes send, each by a task of the process's user or tenant: a
// system call on a descriptor that came from a process may block, and must not hold up the thread
// that serves all sessions. FdListener owns it. Thread-safe, because it keeps no state of its own.
//
// A connection has one request in progress at a time, and gets no further one served before it has
// read the last response. So a process cannot make crumbd queue responses without a bound.
class PoolRequests {
 public:
  // `plane` null: there are no device pools. `plane` and `metrics` must outlive the tasks. Tasks
  // keep references to `tasks`' state and to `unread`.
  PoolRequests(PoolPlane* plane, std::shared_ptr<OwnerTasks> tasks,
               std::shared_ptr<UnreadDescriptors> unread, ServerMetrics& metrics)
      : plane_(plane), tasks_(std::move(tasks)), unread_(std::move(unread)), metrics_(metrics) {}

  // Returns whether processes may send PoolRequests at all; the welcome says so to each.
  bool enabled() const { return plane_ != nullptr && plane_->enabled(); }

  // Has a task of `owner` serve the request in `message` and send the response over `socket`, which
  // it ends if the process does not read. `busy` is true until the response is on its way. Returns
  // false, and leaves the message, if it is no PoolRequest, a request of the connection is being
  // served, the process has not read the last response, or the owner has too many tasks.
  bool Serve(const std::shared_ptr<Session>& session,
             const std::shared_ptr<std::atomic<bool>>& busy, const SharedFd& socket,
             const std::string& owner, FdMessage& message) const;

 private:
  PoolPlane* const plane_;
  const std::shared_ptr<OwnerTasks> tasks_;
  const std::shared_ptr<UnreadDescriptors> unread_;
  ServerMetrics& metrics_;
};

}  // namespace crumb::server
