// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "absl/status/status.h"
#include "common/config_visitor.h"
#include "server/base/tls_options.h"

namespace crumb::server {

// The places where crumbd serves gRPC and hands out memory: section `listen` of crumbd.yaml,
// described in docs/config.md.
struct ListenOptions {
  // Folder of the sockets, which must exist and be writable.
  std::string socket_dir = "/run/crumb";
  std::string unix_socket;  // empty: <socket_dir>/crumbd.sock
  std::string fd_socket;    // empty: <socket_dir>/crumbd.fd.sock
  std::string tcp;          // HOST:PORT; empty: no TCP
  // File with the addresses in use, written once crumbd serves.
  std::string endpoints_file;  // empty: <socket_dir>/crumbd.endpoints.json
  TlsOptions tls;              // TLS of `tcp`

  void Visit(ConfigVisitor& visitor);
  // kInvalidArgument naming key and bound.
  absl::Status Validate() const;
};

}  // namespace crumb::server
