// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "tests/server/raw_connections.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <cerrno>
#include <cstring>
#include <utility>

namespace crumb::server {
namespace {

sockaddr_in Loopback(const std::string& address, int port) {
  sockaddr_in place{};
  place.sin_family = AF_INET;
  place.sin_port = htons(static_cast<uint16_t>(port));
  ::inet_pton(AF_INET, address.c_str(), &place.sin_addr);
  return place;
}

// Returns whether the other side has closed the connection. Skips the gRPC settings that it sent.
bool Closed(int socket) {
  while (true) {
    char buffer[4096];
    const ssize_t size = ::recv(socket, buffer, sizeof(buffer), MSG_DONTWAIT);
    if (size > 0) continue;
    return size == 0 || (errno != EAGAIN && errno != EINTR);
  }
}

}  // namespace

bool RawConnections::OpenTcp(const std::string& from, int port) {
  UniqueFd fd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const sockaddr_in own = Loopback(from, 0);
  const sockaddr_in other = Loopback("127.0.0.1", port);
  if (::bind(fd.get(), reinterpret_cast<const sockaddr*>(&own), sizeof(own)) != 0 ||
      ::connect(fd.get(), reinterpret_cast<const sockaddr*>(&other), sizeof(other)) != 0) {
    return false;
  }
  sockets_.push_back(std::move(fd));
  return true;
}

bool RawConnections::OpenUnix(const std::string& path) {
  sockaddr_un place{};
  place.sun_family = AF_UNIX;
  std::memcpy(place.sun_path, path.c_str(), path.size());
  UniqueFd fd(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (::connect(fd.get(), reinterpret_cast<const sockaddr*>(&place), sizeof(place)) != 0) {
    return false;
  }
  sockets_.push_back(std::move(fd));
  return true;
}

bool RawConnections::Send(size_t connection, const std::string& bytes) {
  return ::send(sockets_[connection].get(), bytes.data(), bytes.size(),
                MSG_NOSIGNAL | MSG_DONTWAIT) == static_cast<ssize_t>(bytes.size());
}

size_t RawConnections::Open() const {
  size_t open = 0;
  for (const UniqueFd& socket : sockets_) open += Closed(socket.get()) ? 0 : 1;
  return open;
}

int PortOfAddress(const std::string& address) {
  return std::stoi(address.substr(address.rfind(':') + 1));
}

}  // namespace crumb::server
