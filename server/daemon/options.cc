// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "server/daemon/options.h"

#include <utility>

#include "common/status_macros.h"
#include "server/base/listen_check.h"
#include "server/base/tcp_listener.h"

namespace crumb::server {

namespace {

void VisitStopGrace(ConfigVisitor& visitor, Duration& stop_grace) {
  visitor.Field("stop_grace", stop_grace, kPositive,
                "Time for calls in progress, and again for queued writes, when crumbd stops.");
}

}  // namespace

void LogOptions::Visit(ConfigVisitor& visitor) {
  visitor.Field("severity", severity, {"debug", "info", "warning", "error", "off"},
                "debug, info, warning, error or off.");
}

absl::Status LogOptions::Validate() const { return CheckValues("log", *this); }

Options::Options() { store.ssd.path = "/var/lib/crumb"; }

void Options::Visit(ConfigVisitor& visitor) {
  visitor.Section("listen", [&] { listen.Visit(visitor); });
  visitor.Section("admin", [&] { admin.Visit(visitor); });
  visitor.Section("store", [&] { store.Visit(visitor); });
  visitor.Section("sessions", [&] { sessions.Visit(visitor); });
  visitor.Section("device_pools", [&] { device_pools.Visit(visitor); });
  visitor.Section("tenants", [&] { tenants.Visit(visitor); });
  visitor.Section("limits", [&] { limits.Visit(visitor); });
  visitor.Section("cluster", [&] { cluster.Visit(visitor); });
  visitor.Section("transport", [&] { transport.Visit(visitor); });
  visitor.Section("log", [&] { log.Visit(visitor); });
  VisitStopGrace(visitor, stop_grace);
}

void Options::Complete() {
  const auto fill = [this](std::string& path, const char* name) {
    if (path.empty()) path = listen.socket_dir + "/" + name;
  };
  fill(listen.unix_socket, "crumbd.sock");
  fill(listen.fd_socket, "crumbd.fd.sock");
  fill(listen.endpoints_file, "crumbd.endpoints.json");
}

absl::Status Options::Validate() const {
  CRUMB_RETURN_IF_ERROR(listen.Validate());
  CRUMB_RETURN_IF_ERROR(admin.Validate());
  CRUMB_RETURN_IF_ERROR(store.Validate());
  CRUMB_RETURN_IF_ERROR(sessions.Validate());
  CRUMB_RETURN_IF_ERROR(device_pools.Validate());
  CRUMB_RETURN_IF_ERROR(tenants.Validate());
  CRUMB_RETURN_IF_ERROR(limits.Validate());
  CRUMB_RETURN_IF_ERROR(cluster.Validate(listen.tcp));
  if (cluster.enabled() && listen.tls.enabled() && listen.tls.client_ca_file.empty()) {
    return absl::InvalidArgumentError(
        "a cluster over TLS needs listen.tls.client_ca_file: nodes check each other with it");
  }
  if (cluster.enabled() && tenants.enabled() && listen.tls.peer_name.empty()) {
    return absl::InvalidArgumentError(
        "tenants.file in a cluster needs listen.tls.peer_name: else a tenant could request "
        "pages as nodes do");
  }
  CRUMB_RETURN_IF_ERROR(transport.Validate());
  CRUMB_RETURN_IF_ERROR(log.Validate());
  return CheckValues(
      "", [grace = stop_grace](ConfigVisitor& visitor) mutable { VisitStopGrace(visitor, grace); });
}

absl::Status CheckListeners(const Options& options) {
  CRUMB_RETURN_IF_ERROR(CheckUnixSocketFree(options.listen.unix_socket));
  CRUMB_RETURN_IF_ERROR(CheckUnixSocketFree(options.listen.fd_socket));
  for (const auto& [key, text] : {std::pair{"listen.tcp", options.listen.tcp},
                                  std::pair{"admin.listen", options.admin.listen}}) {
    if (text.empty()) continue;
    CRUMB_ASSIGN_OR_RETURN(const HostPort address, ParseHostPort(key, text));
    CRUMB_RETURN_IF_ERROR(CheckTcpFree(key, address));
  }
  const auto now = std::chrono::system_clock::now();
  if (!options.cluster.etcd.empty()) {
    CRUMB_RETURN_IF_ERROR(options.cluster.etcd_access.CheckFiles(now));
  }
  return options.listen.tls.CheckFiles(now);
}

}  // namespace crumb::server
