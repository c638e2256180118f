// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/config_visitor.h"
#include "server/cluster/cluster_options.h"
#include "server/device/pool_options.h"
#include "server/limits.h"
#include "server/tenants/tenant_options.h"
#include "server/tls_options.h"
#include "storage/store_options.h"
#include "transport/transport_options.h"

// The settings of crumbd.yaml, section by section. docs/config.md lists every key.
namespace crumb::server {

struct ListenOptions {
  std::string socket_dir = "/run/crumb";
  std::string unix_socket;     // empty: <socket_dir>/crumbd.sock
  std::string fd_socket;       // empty: <socket_dir>/crumbd.fd.sock
  std::string tcp;             // HOST:PORT; empty: no TCP
  std::string endpoints_file;  // empty: <socket_dir>/crumbd.endpoints.json
  TlsOptions tls;              // of tcp

  void Visit(ConfigVisitor& visitor);
  absl::Status Validate() const;
};

struct AdminOptions {
  std::string listen = "127.0.0.1:9464";  // HOST:PORT; empty: no admin port
  int64_t threads = 2;
  int64_t connections_max = 64;
  Duration read_timeout = std::chrono::seconds(5);
  Duration history_interval = std::chrono::seconds(10);
  int64_t history_samples_max = 360;

  void Visit(ConfigVisitor& visitor);
  absl::Status Validate() const;
};

struct LogOptions {
  std::string severity = "info";

  void Visit(ConfigVisitor& visitor);
  absl::Status Validate() const;
};

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
  Duration stop_grace = std::chrono::seconds(10);

  void Visit(ConfigVisitor& visitor);

  // Fills in what other fields imply. Call once, after reading.
  void Complete();

  // kInvalidArgument naming key and bound.
  absl::Status Validate() const;
};

// "HOST:PORT" with a port from 0 to 65535; the host may be [IPv6]. kInvalidArgument naming `key`.
struct HostPort {
  std::string host;  // without brackets
  int port = 0;
};
absl::StatusOr<HostPort> ParseHostPort(const std::string& key, const std::string& text);

}  // namespace crumb::server
