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

// TLS of gRPC over TCP, for callers and among crumbds: the section listen.tls of the configuration,
// described in docs/security.md. Unix sockets have no TLS.
struct TlsOptions {
  std::string cert_file;  // empty: no TLS
  std::string key_file;
  std::string client_ca_file;  // empty: callers need no certificate
  std::string peer_name;       // the name in every crumbd's certificate; empty: no such rule
  // Time between looks at the files, in whole seconds; new ones serve the next connections.
  Duration reload_interval = std::chrono::seconds(10);
  // A certificate that ends sooner than this is logged once a day.
  Duration expiry_warning = std::chrono::hours(14 * 24);

  bool enabled() const { return !cert_file.empty(); }

  void Visit(ConfigVisitor& visitor);
  // kInvalidArgument naming key and bound. Reads no file.
  absl::Status Validate() const;
  // Returns the files that a CertificateWatch looks at.
  std::vector<CertificateWatch::Certificate> Certificates() const;
  // Reads the files and returns the result of CheckTlsFiles, whose errors name the setting and the
  // file. Called at the start, before gRPC reads them and says less.
  absl::Status CheckFiles(std::chrono::system_clock::time_point now) const;
};

}  // namespace crumb::server
