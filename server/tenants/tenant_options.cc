// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "server/tenants/tenant_options.h"

namespace crumb::server {

void TenantOptions::Visit(ConfigVisitor& visitor) {
  visitor.Field("file", file,
                "JSON file of tenants and their tokens; read again when it changes, and on SIGHUP. "
                "Empty: callers need no token.");
  visitor.Field("shared_memory", shared_memory,
                "Host memory that tenants' processes map. off: none, they read and write by gRPC. "
                "own: slabs that hold only pages of their tenant, at least one for each tenant. "
                "all: every slab, including pages of other tenants.");
  visitor.Field("tenants_max", tenants_max, "Tenants, and so labels of metrics.");
  visitor.Field("part_max_percent", part_max_percent,
                "Percentage that one tenant may take of the part of a bounded resource (streams, "
                "sessions, queue places, memory kept by leases and pins, keyspaces) that other "
                "tenants do not use.");
  visitor.Field("reload_interval", reload_interval, "Time between looks at the file.");
}

absl::Status TenantOptions::Validate() const {
  if (shared_memory != "off" && shared_memory != "own" && shared_memory != "all") {
    return absl::InvalidArgumentError("unknown tenants.shared_memory '" + shared_memory +
                                      "'; known are off, own, all");
  }
  if (tenants_max < 1 || tenants_max > 4096) {
    return absl::InvalidArgumentError("tenants.tenants_max is " + std::to_string(tenants_max) +
                                      ", must be from 1 to 4096");
  }
  if (part_max_percent < 1 || part_max_percent > 100) {
    return absl::InvalidArgumentError("tenants.part_max_percent is " +
                                      std::to_string(part_max_percent) + ", must be from 1 to 100");
  }
  if (reload_interval < std::chrono::milliseconds(100)) {
    return absl::InvalidArgumentError("tenants.reload_interval must be at least 100ms");
  }
  return absl::OkStatus();
}

}  // namespace crumb::server
