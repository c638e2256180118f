// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "common/config_visitor.h"
#include "common/tls_files.h"
#include "server/base/certificate_watch.h"

namespace crumb::server {

// TLS of gRPC over TCP, for callers and among crumbds: docs/security.md.
struct TlsOptions {
  std::string cert_file;  // empty: no TLS
  std::string key_file;
  std::string client_ca_file;  // empty: callers need no certificate
  std::string peer_name;       // the name in every crumbd's certificate; empty: no such rule
  Duration reload_interval = std::chrono::seconds(10);
  Duration expiry_warning = std::chrono::hours(14 * 24);

  bool enabled() const { return !cert_file.empty(); }

  void Visit(ConfigVisitor& visitor);
  // kInvalidArgument naming key and bound. Reads no file.
  absl::Status Validate() const;
  // Returns the files that a CertificateWatch looks at.
  std::vector<CertificateWatch::Certificate> Certificates() const;
  // Returns the result of CheckTlsFiles.
  absl::Status CheckFiles(std::chrono::system_clock::time_point now) const;
};

}  // namespace crumb::server
