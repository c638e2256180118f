// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "tests/bench/scripted_server.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <utility>

namespace crumb::bench {

ScriptedServer::ScriptedServer(Answer answer)
    : answer_(std::move(answer)), listener_(::socket(AF_INET, SOCK_STREAM, 0)) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof(address);
  auto* generic = reinterpret_cast<sockaddr*>(&address);
  if (::bind(listener_.get(), generic, size) == 0 && ::listen(listener_.get(), 1) == 0 &&
      ::getsockname(listener_.get(), generic, &size) == 0) {
    port_ = ntohs(address.sin_port);
  }
  thread_ = Thread("scripted", [this] { Run(); });
}

// Ends an accept without a client; a connection ends with its client.
ScriptedServer::~ScriptedServer() { ::shutdown(listener_.get(), SHUT_RDWR); }

void ScriptedServer::Run() {
  const UniqueFd connection(::accept(listener_.get(), nullptr, nullptr));
  if (!connection.valid()) return;
  std::string buffer(1 << 20, '\0');
  bool close = false;
  while (!close) {
    const ssize_t size = ::recv(connection.get(), buffer.data(), buffer.size(), 0);
    if (size <= 0) return;
    const std::string reply = answer_(buffer.substr(0, static_cast<size_t>(size)), &close);
    for (size_t sent = 0; sent < reply.size();) {
      const ssize_t part =
          ::send(connection.get(), reply.data() + sent, reply.size() - sent, MSG_NOSIGNAL);
      if (part <= 0) return;
      sent += static_cast<size_t>(part);
    }
  }
}

}  // namespace crumb::bench
