// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "common/metrics.h"
#include "server/admin/admin_options.h"

namespace crumb::server {

// HTTP for operators: / (the status page), /metrics, /healthz, /readyz, /status.json. It serves
// from the start of the daemon, so that a recovery can be watched; pages without content yet have
// the status 503. It has no TLS and no token, so it listens on loopback by default. The daemon owns
// it. Thread-safe.
class AdminServer {
 public:
  // The content of the pages; called on this server's threads.
  struct Pages {
    // Whether crumbd serves: the status of /readyz.
    std::function<bool()> ready;
    std::function<std::string()> metrics;  // Prometheus text; empty: not yet
    std::function<std::string()> status;   // JSON; empty: not yet
    std::function<std::string()> page;     // HTML; empty: not yet
  };

  // Serves from now on. `closed` counts connections that ended without their response, and must
  // outlive this. kAlreadyExists: the port is in use.
  static absl::StatusOr<std::unique_ptr<AdminServer>> Start(const AdminOptions& options,
                                                            Pages pages, Counter& closed);

  // Stops. No function of Pages is called afterwards.
  virtual ~AdminServer() = default;

  // Returns "HOST:PORT" with the real port.
  virtual std::string address() const = 0;
};

}  // namespace crumb::server
