// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "server/service/listen_options.h"

#include "common/status_macros.h"
#include "server/base/tcp_listener.h"

namespace crumb::server {

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

}  // namespace crumb::server
