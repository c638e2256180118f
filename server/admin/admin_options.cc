// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "server/admin/admin_options.h"

#include "common/status_macros.h"
#include "server/base/tcp_listener.h"

namespace crumb::server {

void AdminOptions::Visit(ConfigVisitor& visitor) {
  visitor.Field(
      "listen", listen,
      "HOST:PORT of the status page, /metrics, /healthz, /readyz and /status.json; port 0: "
      "any. Empty: none.");
  visitor.Field("threads", threads, "Threads that handle requests.");
  visitor.Field("connections_max", connections_max,
                "Connections at once; a new one takes the place of the oldest whose request has "
                "not arrived.");
  visitor.Field("read_timeout", read_timeout,
                "Time for a whole request to arrive, and again for its response to be read.");
  visitor.Field("history_interval", history_interval, "Time between samples of the status page.");
  visitor.Field("history_samples_max", history_samples_max,
                "Samples that its charts go back; older ones are dropped.");
}

absl::Status AdminOptions::Validate() const {
  if (!listen.empty()) CRUMB_RETURN_IF_ERROR(ParseHostPort("admin.listen", listen).status());
  if (threads < 1 || threads > 64) {
    return absl::InvalidArgumentError("admin.threads is " + std::to_string(threads) +
                                      ", must be from 1 to 64");
  }
  if (connections_max < 1 || connections_max > 4096) {
    return absl::InvalidArgumentError("admin.connections_max is " +
                                      std::to_string(connections_max) + ", must be from 1 to 4096");
  }
  if (read_timeout < std::chrono::milliseconds(1)) {
    return absl::InvalidArgumentError("admin.read_timeout must be at least 1ms");
  }
  if (history_interval < std::chrono::milliseconds(10)) {
    return absl::InvalidArgumentError("admin.history_interval must be at least 10ms");
  }
  if (history_samples_max < 2 || history_samples_max > 100'000) {
    return absl::InvalidArgumentError("admin.history_samples_max is " +
                                      std::to_string(history_samples_max) +
                                      ", must be from 2 to 100000");
  }
  return absl::OkStatus();
}

}  // namespace crumb::server
