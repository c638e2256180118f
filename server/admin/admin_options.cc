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
  visitor.Field("threads", threads, {.least = 1, .most = 64}, "Threads that handle requests.");
  visitor.Field("connections_max", connections_max, {.least = 1, .most = 4096},
                "Connections at once; a new one takes the place of the oldest whose request has "
                "not arrived.");
  visitor.Field("read_timeout", read_timeout, {.least = std::chrono::milliseconds(1)},
                "Time for a whole request to arrive, and again for its response to be read.");
  visitor.Field("history_interval", history_interval, {.least = std::chrono::milliseconds(10)},
                "Time between samples of the status page.");
  visitor.Field("history_samples_max", history_samples_max, {.least = 2, .most = 100'000},
                "Samples that its charts go back; older ones are dropped.");
}

absl::Status AdminOptions::Validate() const {
  if (!listen.empty()) CRUMB_RETURN_IF_ERROR(ParseHostPort("admin.listen", listen).status());
  return CheckValues("admin", *this);
}

}  // namespace crumb::server
