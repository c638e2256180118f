// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/config_visitor.h"

namespace crumb::server {

// How this node shows itself to etcd, and checks that it is etcd: docs/security.md.
struct EtcdAccess {
  std::string ca_file;    // empty: plaintext
  std::string cert_file;  // empty: etcd requires none
  std::string key_file;
  std::string server_name;  // the name in etcd's certificate; empty: the host of its address
  Duration reload_interval = std::chrono::seconds(10);
  std::string user;  // empty: etcd requires none
  std::string password_file;

  bool tls() const { return !ca_file.empty(); }

  void Visit(ConfigVisitor& visitor);
  // kInvalidArgument naming key and bound. Reads no file.
  absl::Status Validate() const;
  // Reads the files and checks that they can be used now; errors name setting and file.
  absl::Status CheckFiles(std::chrono::system_clock::time_point now) const;
};

// The password in `path`, without the end of its line. kNotFound: it cannot be read;
// kInvalidArgument: it is empty or longer than 4 KiB.
absl::StatusOr<std::string> ReadPassword(const std::string& path);

}  // namespace crumb::server
