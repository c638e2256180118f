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
// thread, crumb-sessions, woken by its sockets and pidfds. It waits for no process: the only system
// calls that it makes on a received descriptor are those that recognize a pidfd. PoolRequests are
// handled, and other received descriptors closed, by tasks of the process's tenant or user
// (OwnerTasks).
//
// The daemon owns the only one and destroys it before the session table, the store and the planes
// that it refers to. The messages are in proto/crumb/v1/session.proto.
//
// The life of a process's connection; SessionTable has the matching phases of its session
// (Session::Phase):
//
//   connected --hello, welcome--> open --process closes its end--> watched --process exits--> gone
//      |                           '----------------process exits------------------------------^
//      '--hello is late, wrong or refused, or its place is needed--> closed
class FdListener {
 public:
  struct Options {
    // Path of the Unix socket; its folder must exist.
    std::string path;
    SessionLimits limits;
    uint64_t epoch = 0;  // epoch of the slabs
    // Tenants' tokens; without a table every allowed user may open sessions.
    SessionTenants tenants = {};
    PoolPlane* pools = nullptr;  // null: none; outlives this
    // Null: sessions get no sockets for Acquires, or for Reserves and Commits; they outlive this.
    CallPlane* calls = nullptr;
    CallPlane* staging_calls = nullptr;
  };

  // kAlreadyExists: another crumbd listens there; kNotFound: the folder is missing. The references
  // must outlive this. Sets the table's OnEnded.
  static absl::StatusOr<std::unique_ptr<FdListener>> Start(const Options& options,
                                                           SessionTable& sessions,
                                                           storage::TieredStore& store,
                                                           ServerMetrics& metrics);

  // Stops the thread and removes the socket. Sessions stay in the table. No call that ends sessions
  // may be in progress.
  virtual ~FdListener() = default;
};

}  // namespace crumb::server
