// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "server/tenants/tenant_options.h"

namespace crumb::server {

void TenantOptions::Visit(ConfigVisitor& visitor) {
  visitor.Field("file", file,
                "JSON file of tenants and their tokens; read again when it changes, and on SIGHUP. "
                "Empty: callers need no token.");
  visitor.Field("shared_memory", shared_memory, {"off", "own", "all"},
                "Host memory that tenants' processes map. off: none, they read and write by gRPC. "
                "own: slabs that hold only pages of their tenant, at least one for each tenant. "
                "all: every slab, including pages of other tenants.");
  visitor.Field("tenants_max", tenants_max, {.least = 1, .most = 4096},
                "Tenants, and so labels of metrics.");
  visitor.Field("part_max_percent", part_max_percent, {.least = 1, .most = 100},
                "Percentage that one tenant may take of the part of a bounded resource (streams, "
                "sessions, queue places, memory kept by leases and pins, keyspaces) that other "
                "tenants do not use.");
  visitor.Field("reload_interval", reload_interval, {.least = std::chrono::milliseconds(100)},
                "Time between looks at the file.");
}

absl::Status TenantOptions::Validate() const { return CheckValues("tenants", *this); }

}  // namespace crumb::server
