// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "server/cluster/etcd/etcd_access.h"

#include <fstream>
#include <sstream>

#include "common/status_macros.h"
#include "common/tls_files.h"

namespace crumb::server {
namespace {

constexpr size_t kPasswordMax = 4096;

}  // namespace

void EtcdAccess::Visit(ConfigVisitor& visitor) {
  visitor.Field("ca_file", ca_file,
                "PEM: the authorities of etcd's certificate. Empty: etcd is called in plaintext.");
  visitor.Field("cert_file", cert_file,
                "PEM: this node's certificate for etcd and intermediates. Empty: it shows none.");
  visitor.Field("key_file", key_file, "PEM: the private key of it.");
  visitor.Field("server_name", server_name,
                "DNS name that etcd's certificate carries. Empty: the host in cluster.etcd.");
  visitor.Field("reload_interval", reload_interval,
                {.least = std::chrono::seconds(1), .most = std::chrono::hours(24)},
                "Time between looks at the files; new ones serve the next connections. Whole "
                "seconds.");
  visitor.Field("user", user, "etcd's user for this node. Empty: none.");
  visitor.Field("password_file", password_file,
                "File with the user's password, read at each login.");
}

absl::Status EtcdAccess::Validate() const {
  const auto wrong = [](const char* text) { return absl::InvalidArgumentError(text); };
  if (cert_file.empty() != key_file.empty()) {
    return wrong(
        "cluster.etcd_access.cert_file and cluster.etcd_access.key_file belong together: set both "
        "or none");
  }
  if (!tls() && (!cert_file.empty() || !server_name.empty())) {
    return wrong("cluster.etcd_access.cert_file and server_name need cluster.etcd_access.ca_file");
  }
  if (user.empty() != password_file.empty()) {
    return wrong(
        "cluster.etcd_access.user and cluster.etcd_access.password_file belong together: set both "
        "or none");
  }
  return CheckValues("cluster.etcd_access", *this);
}

absl::Status EtcdAccess::CheckFiles(std::chrono::system_clock::time_point now) const {
  if (!user.empty()) CRUMB_RETURN_IF_ERROR(ReadPassword(password_file).status());
  return CheckTlsFiles({{"cluster.etcd_access.cert_file", cert_file},
                        {"cluster.etcd_access.key_file", key_file},
                        {"cluster.etcd_access.ca_file", ca_file}},
                       now);
}

absl::StatusOr<std::string> ReadPassword(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::stringstream content;
  content << file.rdbuf();
  if (!file) return absl::NotFoundError("cluster.etcd_access.password_file: cannot read " + path);
  std::string password = content.str();
  while (!password.empty() && (password.back() == '\n' || password.back() == '\r')) {
    password.pop_back();
  }
  if (password.empty() || password.size() > kPasswordMax) {
    return absl::InvalidArgumentError("cluster.etcd_access.password_file: " + path +
                                      " must hold from 1 to 4096 bytes");
  }
  return password;
}

}  // namespace crumb::server
