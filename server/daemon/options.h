// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "absl/status/status.h"
#include "common/config_visitor.h"
#include "server/admin/admin_options.h"
#include "server/base/limits.h"
#include "server/cluster/cluster_options.h"
#include "server/device/pool_options.h"
#include "server/service/listen_options.h"
#include "server/tenants/tenant_options.h"
#include "storage/store_options.h"
#include "transport/transport_options.h"

// The settings of crumbd.yaml, section by section. docs/config.md lists every key.
namespace crumb::server {

// The least severe log lines that are written: "debug", "info", "warning", "error" or "off" for
// none.
struct LogOptions {
  std::string severity = "info";

  void Visit(ConfigVisitor& visitor);
  absl::Status Validate() const;
};

// All settings of crumbd.yaml, section by section; each section's struct is declared with the
// component that it configures. docs/config.md lists every key. Read once at the start and constant
// afterwards.
struct Options {
  Options();

  ListenOptions listen;
  AdminOptions admin;
  storage::StoreOptions store;
  SessionLimits sessions;
  PoolOptions device_pools;
  TenantOptions tenants;
  Limits limits;
  ClusterOptions cluster;
  transport::TransportOptions transport;
  LogOptions log;
  // Time for calls in progress, and again for queued writes, when crumbd stops.
  Duration stop_grace = std::chrono::seconds(10);

  void Visit(ConfigVisitor& visitor);

  // Fills in fields that follow from other fields. REQUIRES: it is called once, after reading.
  void Complete();

  // kInvalidArgument naming key and bound.
  absl::Status Validate() const;
};

// Checks whether crumbd could listen at the sockets and ports that `options` name (the codes are
// those of server/base/listen_check.h), and whether its TLS files can be used.
absl::Status CheckListeners(const Options& options);

}  // namespace crumb::server
