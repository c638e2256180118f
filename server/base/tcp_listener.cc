// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "server/base/tcp_listener.h"

#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <cerrno>
#include <charconv>
#include <memory>
#include <utility>

#include "common/errno_status.h"
#include "common/status_macros.h"

namespace crumb::server {
namespace {

// The kernel cuts this to net.core.somaxconn.
constexpr int kBacklog = 4096;

bool IsWildcard(const sockaddr& address) {
  if (address.sa_family == AF_INET) {
    return reinterpret_cast<const sockaddr_in&>(address).sin_addr.s_addr == htonl(INADDR_ANY);
  }
  return IN6_IS_ADDR_UNSPECIFIED(&reinterpret_cast<const sockaddr_in6&>(address).sin6_addr) != 0;
}

int PortOf(int socket) {
  sockaddr_storage address{};
  socklen_t size = sizeof(address);
  if (::getsockname(socket, reinterpret_cast<sockaddr*>(&address), &size) != 0) return 0;
  return ntohs(address.ss_family == AF_INET ? reinterpret_cast<sockaddr_in&>(address).sin_port
                                            : reinterpret_cast<sockaddr_in6&>(address).sin6_port);
}

// An invalid descriptor, with errno: this kernel lacks the family, or the address is in use.
UniqueFd ListenAt(const sockaddr* address, socklen_t size, bool dual_stack) {
  UniqueFd fd(::socket(address->sa_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!fd.valid()) return fd;
  const int on = 1;
  const int v6_only = dual_stack ? 0 : 1;
  ::setsockopt(fd.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
  ::setsockopt(fd.get(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));  // accepted sockets inherit it
  if (address->sa_family == AF_INET6) {
    ::setsockopt(fd.get(), IPPROTO_IPV6, IPV6_V6ONLY, &v6_only, sizeof(v6_only));
  }
  if (::bind(fd.get(), address, size) != 0 || ::listen(fd.get(), kBacklog) != 0) {
    const int error = errno;
    fd.Reset();
    errno = error;
  }
  return fd;
}

// Both families with one socket; an invalid descriptor where there is no IPv6.
UniqueFd ListenAtBothWildcards(int port) {
  sockaddr_in6 any{};
  any.sin6_family = AF_INET6;
  any.sin6_port = htons(static_cast<uint16_t>(port));
  return ListenAt(reinterpret_cast<const sockaddr*>(&any), sizeof(any), /*dual_stack=*/true);
}

}  // namespace

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

absl::StatusOr<std::vector<UniqueFd>> ListenTcp(const std::string& key, HostPort& place,
                                                WildcardListens wildcard) {
  const std::string text = key + " " + place.host + ":" + std::to_string(place.port);
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_PASSIVE;
  addrinfo* list = nullptr;
  const int error = ::getaddrinfo(place.host.c_str(), nullptr, &hints, &list);
  if (error != 0) return absl::InvalidArgumentError(text + ": " + ::gai_strerror(error));
  const std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)> owner(list, ::freeaddrinfo);
  std::vector<UniqueFd> sockets;
  for (const addrinfo* entry = list; entry != nullptr; entry = entry->ai_next) {
    if (entry->ai_family != AF_INET && entry->ai_family != AF_INET6) continue;
    UniqueFd fd;
    if (wildcard == WildcardListens::kBothFamilies && IsWildcard(*entry->ai_addr)) {
      fd = ListenAtBothWildcards(place.port);
    }
    const bool both = fd.valid();
    if (!both) {
      const in_port_t port = htons(static_cast<uint16_t>(place.port));
      (entry->ai_family == AF_INET ? reinterpret_cast<sockaddr_in*>(entry->ai_addr)->sin_port
                                   : reinterpret_cast<sockaddr_in6*>(entry->ai_addr)->sin6_port) =
          port;
      fd = ListenAt(entry->ai_addr, entry->ai_addrlen, /*dual_stack=*/false);
      if (!fd.valid() && errno == EAFNOSUPPORT) continue;
      if (!fd.valid()) return ErrnoStatus(errno, text);
    }
    place.port = PortOf(fd.get());
    sockets.push_back(std::move(fd));
    if (both) break;
  }
  if (sockets.empty()) return absl::UnavailableError(text + ": cannot listen there");
  return sockets;
}

UniqueFd AcceptConnection(int listener) {
  return UniqueFd(::accept4(listener, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
}

}  // namespace crumb::server
