// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/cluster/protocol_versions.h"
#include "server/daemon/options.h"
#include "storage/tiered_store.h"

namespace crumb::server {

// All of crumbd but its command line: store, sessions, services, admin port. The program makes one;
// tests make several in one process. Functions other than endpoints are called on one thread.
//
//   Start: admin port --> store recovered --> calls served --> ready
//   Stop:  calls refused --> calls in progress end --> queued writes end --> store closed
class Daemon {
 public:
  // The addresses at which a daemon serves.
  struct Endpoints {
    std::string unix_socket;
    std::string fd_socket;
    std::string tcp;    // HOST:PORT with the real port; empty: none
    std::string admin;  // the same
  };

  // The function that opens the store; tests pass one that opens a fake.
  using OpenStore = std::function<absl::StatusOr<std::unique_ptr<storage::TieredStore>>(
      const storage::StoreOptions&, Clock&, storage::StoreEvents, storage::StoreStart)>;

  // Recovers the store and serves from then on. `options` are complete and valid. Errors name the
  // setting, socket, port or file.
  static absl::StatusOr<std::unique_ptr<Daemon>> Start(
      const Options& options, const OpenStore& open_store = storage::TieredStore::Open,
      std::unique_ptr<storage::HandedOverMemory> handed_over = nullptr,
      const ProtocolVersions& versions = {});

  virtual ~Daemon() = default;

  // Returns the addresses, with the real ports.
  virtual Endpoints endpoints() const = 0;

  // Reads tenants.file again if it has changed or if `always`. A fault of the file is logged and
  // leaves the tenants unchanged. Also checks when certificates end. Blocks.
  virtual void Reload(bool always) = 0;

  // Refuses new calls, waits for those in progress and for queued writes, within the grace of the
  // options each. Idempotent; also done on destruction.
  virtual absl::Status Stop() = 0;

  // Stops, and returns the host memory for the daemon that follows, in this process or another.
  // Sockets, ports and the SSD folder are free once this object is gone.
  virtual absl::StatusOr<storage::HandedOverMemory> HandOver() = 0;
};

}  // namespace crumb::server
