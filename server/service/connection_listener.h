// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <sys/types.h>

#include <atomic>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/clock.h"
#include "common/tenant_budget.h"
#include "common/thread.h"
#include "common/unique_fd.h"
#include "grpcpp/server_builder.h"
#include "server/base/limits.h"
#include "server/base/tcp_listener.h"
#include "server/metrics/server_metrics.h"

namespace crumb::server {

// Accepts the connections of gRPC's Unix socket and TCP port, because gRPC itself accepts as many
// as the process may have descriptors: a caller without a token could then keep the others from
// connecting, and crumbd from opening files of pages.
//
// The number of connections is bounded in total and, by the rule of TenantBudget, for each peer: a
// user on the Unix socket, or a remote address (for IPv6 a network of 64 bits, the usual size of
// one host's). A connection beyond the bound is closed at once. The total is at most half of the
// descriptors that the process may open, so that files and sessions find some.
//
// gRPC owns a connection from HandleNewConnection on, and does not report when it closes it. A
// place is therefore free again when the connection's descriptor is closed, or is another file:
// device and inode number differ. That is checked when places are needed.
//
// Its thread, crumb-accept, waits for connections. Methods are not thread-safe unless they say so.
class ConnectionListener {
 public:
  // `metrics` must outlive this.
  ConnectionListener(const Limits& limits, ServerMetrics& metrics);
  // Stops.
  ~ConnectionListener();

  // Listens at a Unix socket, with mode 0660, or at a TCP port. Connections wait until Start.
  // Errors are those of the system calls.
  absl::Status ListenUnix(const std::string& path);
  absl::Status ListenTcp(HostPort& place);

  // Hands connections to gRPC's acceptors from now on. REQUIRES: the server of the acceptors is
  // running, and Stop is called before it shuts down. `tcp` may be null if there is no TCP port.
  using Acceptor = grpc::experimental::ExternalConnectionAcceptor;
  absl::Status Start(std::unique_ptr<Acceptor> local, std::unique_ptr<Acceptor> tcp);

  // Accepts no more. The Unix socket's file is removed. Idempotent.
  void Stop();

  // Ends the connections that gRPC still has, whatever their peers read or send. REQUIRES: Stop has
  // returned.
  void Disconnect();

 private:
  struct Connection {
    std::string peer;
    dev_t device = 0;
    ino_t inode = 0;
    int unread_bytes = 0;      // bytes in the full socket at the last check; 0 if it was not full
    TimePoint unread_since{};  // time since which it has had that many
  };
  // The thread.
  void Run();
  // Accepts the connections that wait at a listener. Returns false if descriptors have run out.
  bool Accept(const UniqueFd& listener, bool local);
  // Hands a connection to gRPC, or closes it and counts the rejection.
  void Admit(UniqueFd connection, bool local);
  // Takes a place for the peer; sweeps, and tries again, if there is none.
  TenantBudget::Taken Take(const std::string& peer);
  // Gives back the places of connections that gRPC has closed.
  void Sweep();
  // Ends connections whose peers have read nothing from a full socket for too long.
  void EndUnread();
  // Ends one, if gRPC still has it.
  static void End(int descriptor, const Connection& connection);

  ServerMetrics& metrics_;
  const Duration unread_max_;
  TenantBudget places_;
  std::unordered_map<int, Connection> connections_;  // keyed by descriptor
  std::string path_;                                 // path of the Unix socket
  UniqueFd local_;
  std::vector<UniqueFd> tcp_;
  UniqueFd wake_;
  std::unique_ptr<Acceptor> local_acceptor_;
  std::unique_ptr<Acceptor> tcp_acceptor_;
  std::atomic<bool> stopping_{false};
  Thread thread_;
};

// The peer of a connected socket whose connections are counted together: "uid 1000", "10.0.0.7",
// "2001:db8::". Empty if the connection has ended.
std::string PeerOf(int socket);

}  // namespace crumb::server
