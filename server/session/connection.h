// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <poll.h>

#include <atomic>
#include <cstdint>
#include <memory>

#include "common/unique_fd.h"
#include "server/session/pool_plane.h"
#include "server/session/session.h"
#include "server/session/slab_gate.h"

namespace crumb::server {

// A connection to crumbd.fd.sock, from its accept to the end of its process. It has no lock,
// because only the thread of FdListener uses it; tasks on other threads get copies of the shared
// members. Which members are set says how far the connection has come:
//
//   accepted               socket, user
//   hello accepted         session and pidfd too; slabs, pools and sockets for calls if requested
//   closed by its process  no sockets; session and pidfd stay until the process exits
struct Connection {
  SharedFd socket;             // null once the process closed it
  UniqueFd pidfd;              // none before the hello
  SharedFd pools;              // carries PoolRequests; null: `socket` does, or no socket
  uint64_t calls = 0;          // number of its socket for Acquires; 0 if it has none
  uint64_t staging_calls = 0;  // number of its socket for Reserves and Commits; 0 if it has none
  // Numeric user id of the process that connected, by the kernel's credentials.
  unsigned user = 0;
  std::shared_ptr<Session> session;  // null before the hello
  std::shared_ptr<SlabGate> slabs;   // null: the process has them all
  // True while a PoolRequest is served: the process waits for it before it sends the next.
  std::shared_ptr<std::atomic<bool>> pools_busy = std::make_shared<std::atomic<bool>>(false);
};

// Returns whether the socket has a message, or its other end is closed. An event may have been
// dealt with by an earlier one of its round, which also may have closed the socket.
inline bool HasMessage(const SharedFd& socket) {
  if (socket == nullptr) return false;
  pollfd waiting{socket->get(), POLLIN, 0};
  return ::poll(&waiting, 1, 0) == 1;
}

}  // namespace crumb::server
