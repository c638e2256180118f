// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "server/options.h"

#include <charconv>

#include "common/status_macros.h"

namespace crumb::server {

absl::StatusOr<HostPort> ParseHostPort(const std::string& key, const std::string& text) {
  const auto wrong = [&] {
    return absl::InvalidArgumentError(key + " is '" + text +
                                      "', must be HOST:PORT with a port from 0 to 65535");
  };
  const size_t colon = text.rfind(':');
  if (colon == std::string::npos || colon == 0) return wrong();
  HostPort parsed;
  parsed.host = text.substr(0, colon);
  if (parsed.host.front() == '[') {
    if (parsed.host.back() != ']' || parsed.host.size() < 3) return wrong();
    parsed.host = parsed.host.substr(1, parsed.host.size() - 2);
  } else if (parsed.host.find(':') != std::string::npos) {
    return wrong();
  }
  const char* const end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data() + colon + 1, end, parsed.port);
  if (error != std::errc() || stop != end || parsed.port < 0 || parsed.port > 65535) {
    return wrong();
  }
  return parsed;
}

void ListenOptions::Visit(ConfigVisitor& visitor) {
  visitor.Field("socket_dir", socket_dir, "Folder of the sockets; must exist.");
  visitor.Field("unix", unix_socket, "Unix socket of gRPC. Empty: <socket_dir>/crumbd.sock.");
  visitor.Field("fd_socket", fd_socket,
                "Socket that hands out memory. Empty: <socket_dir>/crumbd.fd.sock.");
  visitor.Field(
      "tcp", tcp,
      "HOST:PORT of gRPC over TCP; neither encrypted nor authenticated unless tls is set; "
      "port 0: any. Empty: none.");
  visitor.Field("endpoints_file", endpoints_file,
                "JSON file with the addresses in use, written once crumbd is ready. Empty: "
                "<socket_dir>/crumbd.endpoints.json.");
  visitor.Section("tls", [&] { tls.Visit(visitor); });
}

absl::Status ListenOptions::Validate() const {
  if (socket_dir.empty()) return absl::InvalidArgumentError("listen.socket_dir is empty");
  if (unix_socket == fd_socket) {
    return absl::InvalidArgumentError("listen.unix and listen.fd_socket are both " + fd_socket);
  }
  if (!tcp.empty()) CRUMB_RETURN_IF_ERROR(ParseHostPort("listen.tcp", tcp).status());
  return tls.Validate();
}

void AdminOptions::Visit(ConfigVisitor& visitor) {
  visitor.Field(
      "listen", listen,
      "HOST:PORT of the status page, /metrics, /healthz, /readyz and /status.json; port 0: "
      "any. Empty: none.");
  visitor.Field("threads", threads, "Threads that answer.");
  visitor.Field("connections_max", connections_max,
                "Connections at once; a new one takes the place of the oldest whose request has "
                "not arrived.");
  visitor.Field("read_timeout", read_timeout,
                "Time for a whole request to arrive, and again for its answer to be read.");
  visitor.Field("history_interval", history_interval, "Time between samples of the status page.");
  visitor.Field("history_samples_max", history_samples_max,
                "Samples that its charts go back; older ones are dropped.");
}

absl::Status AdminOptions::Validate() const {
  if (!listen.empty()) CRUMB_RETURN_IF_ERROR(ParseHostPort("admin.listen", listen).status());
  if (threads < 1 || threads > 64) {
    return absl::InvalidArgumentError("admin.threads is " + std::to_string(threads) +
                                      ", must be from 1 to 64");
  }
  if (connections_max < 1 || connections_max > 4096) {
    return absl::InvalidArgumentError("admin.connections_max is " +
                                      std::to_string(connections_max) + ", must be from 1 to 4096");
  }
  if (read_timeout < std::chrono::milliseconds(1)) {
    return absl::InvalidArgumentError("admin.read_timeout must be at least 1ms");
  }
  if (history_interval < std::chrono::milliseconds(10)) {
    return absl::InvalidArgumentError("admin.history_interval must be at least 10ms");
  }
  if (history_samples_max < 2 || history_samples_max > 100'000) {
    return absl::InvalidArgumentError("admin.history_samples_max is " +
                                      std::to_string(history_samples_max) +
                                      ", must be from 2 to 100000");
  }
  return absl::OkStatus();
}

void LogOptions::Visit(ConfigVisitor& visitor) {
  visitor.Field("severity", severity, "debug, info, warning, error or off.");
}

absl::Status LogOptions::Validate() const {
  for (const char* known : {"debug", "info", "warning", "error", "off"}) {
    if (severity == known) return absl::OkStatus();
  }
  return absl::InvalidArgumentError("log.severity is '" + severity +
                                    "', must be debug, info, warning, error or off");
}

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
  visitor.Field("stop_grace", stop_grace,
                "Time for calls in progress, and again for queued writes, when crumbd stops.");
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
  if (const absl::Status status = store.Validate(); !status.ok()) {
    return absl::InvalidArgumentError("store: " + std::string(status.message()));
  }
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
        "tenants.file in a cluster needs listen.tls.peer_name: else a tenant could ask for pages "
        "as "
        "nodes do");
  }
  CRUMB_RETURN_IF_ERROR(transport.Validate());
  CRUMB_RETURN_IF_ERROR(log.Validate());
  if (stop_grace <= Duration::zero()) {
    return absl::InvalidArgumentError("stop_grace must be more than 0");
  }
  return absl::OkStatus();
}

}  // namespace crumb::server
