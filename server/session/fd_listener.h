// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "server/session/call_plane.h"
#include "server/session/hello.h"
#include "server/session/pool_plane.h"
#include "server/session/session_table.h"
#include "storage/tiered_store.h"

namespace crumb::server {

// Opens sessions at crumbd.fd.sock: takes a process's hello and pidfd, sends token and descriptors,
// passes descriptors of device pools between processes, and ends sessions whose process ends. One
// thread, woken by its sockets and pidfds. It waits for no process: the only system calls that it
// makes on a received descriptor are those that recognize a pidfd. PoolRequests are handled, and
// other received descriptors closed, by tasks of the process's tenant or user (OwnerTasks).
class FdListener {
 public:
  struct Options {
    std::string path;
    SessionLimits limits;
    uint64_t epoch = 0;  // epoch of the slabs
    SessionTenants tenants = {};
    PoolPlane* pools = nullptr;  // null: none; outlives this
    // Null: sessions get no sockets for Acquires, or for Reserves and Commits; they outlive this.
    CallPlane* calls = nullptr;
    CallPlane* staging_calls = nullptr;
  };

  // kAlreadyExists: another crumbd listens there; kNotFound: the folder is missing. The references
  // must outlive this.
  static absl::StatusOr<std::unique_ptr<FdListener>> Start(const Options& options,
                                                           SessionTable& sessions,
                                                           storage::TieredStore& store,
                                                           ServerMetrics& metrics);

  // Stops the thread and removes the socket. Sessions stay in the table. No call that ends sessions
  // may be in progress.
  virtual ~FdListener() = default;
};

}  // namespace crumb::server
