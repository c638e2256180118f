// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "tests/transport/tcp_proxy.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

namespace crumb::transport {
namespace {

constexpr size_t kPieceBytes = 64 << 10;
constexpr auto kDelay = std::chrono::milliseconds(2);

std::atomic<TcpProxy*> current{nullptr};
// The proxy's own connections are not redirected.
thread_local bool direct = false;

sockaddr_in Loopback(int port) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  address.sin_port = htons(static_cast<uint16_t>(port));
  return address;
}

int SystemConnect(int fd, const sockaddr* address, socklen_t size) {
  return static_cast<int>(::syscall(SYS_connect, fd, address, size));
}

}  // namespace

TcpProxy::TcpProxy(std::vector<std::byte> marker) : marker_(std::move(marker)) { current = this; }

TcpProxy::~TcpProxy() {
  current = nullptr;
  ending_ = true;
  {
    const std::lock_guard lock(mutex_);
    for (const int socket : sockets_) ::shutdown(socket, SHUT_RDWR);
  }
  // No thread starts another once its listener is shut down.
  for (size_t i = 0;; ++i) {
    std::thread thread;
    {
      const std::lock_guard lock(mutex_);
      if (i == threads_.size()) break;
      thread = std::move(threads_[i]);
    }
    thread.join();
  }
  for (const int socket : sockets_) ::close(socket);
}

int TcpProxy::PortInstead(int port) {
  TcpProxy* proxy = direct ? nullptr : current.load();
  return proxy == nullptr ? port : proxy->Redirect(port);
}

int TcpProxy::Redirect(int port) {
  const std::lock_guard lock(mutex_);
  if (const auto found = ports_.find(port); found != ports_.end()) return found->second;
  const int listener = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address = Loopback(0);
  socklen_t size = sizeof(address);
  auto* generic = reinterpret_cast<sockaddr*>(&address);
  if (::bind(listener, generic, size) != 0 || ::listen(listener, 64) != 0 ||
      ::getsockname(listener, generic, &size) != 0) {
    ::close(listener);
    return port;
  }
  sockets_.push_back(listener);
  threads_.emplace_back([this, listener, port] { Listen(listener, port); });
  return ports_[port] = ntohs(address.sin_port);
}

void TcpProxy::Listen(int listener, int target) {
  direct = true;
  for (int near; (near = ::accept(listener, nullptr, nullptr)) >= 0 && !ending_;) {
    const int far = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    const sockaddr_in address = Loopback(target);
    const bool up =
        SystemConnect(far, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0;
    const int one = 1;
    for (const int fd : {near, far}) ::setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one));
    const std::lock_guard lock(mutex_);
    sockets_.push_back(near);
    sockets_.push_back(far);
    if (!up || ending_) {
      ::shutdown(near, SHUT_RDWR);
      continue;
    }
    ++connections_;
    threads_.emplace_back([this, near, far] { Pass(near, far); });
    threads_.emplace_back([this, near, far] { Pass(far, near); });
  }
}

bool TcpProxy::Treat(std::byte* piece, size_t& size) {
  switch (mode_.load()) {
    case Mode::kForward:
      return true;
    case Mode::kDrop:
      size = 0;
      return true;
    case Mode::kDelay:
      std::this_thread::sleep_for(kDelay);
      return true;
    case Mode::kCut:
      return false;
    case Mode::kCorrupt: {
      auto* found = static_cast<std::byte*>(::memmem(piece, size, marker_.data(), marker_.size()));
      if (found != nullptr && found + marker_.size() < piece + size) {
        found[marker_.size()] ^= std::byte{32};
        ++corrupted_;
      }
      return true;
    }
  }
  return false;
}

void TcpProxy::Pass(int from, int to) {
  std::vector<std::byte> piece(kPieceBytes);
  for (ssize_t got; (got = ::recv(from, piece.data(), piece.size(), 0)) > 0;) {
    auto size = static_cast<size_t>(got);
    if (!Treat(piece.data(), size)) break;
    for (size_t at = 0; at < size;) {
      const ssize_t sent = ::send(to, piece.data() + at, size - at, MSG_NOSIGNAL);
      if (sent <= 0) break;
      at += static_cast<size_t>(sent);
    }
  }
  ::shutdown(from, SHUT_RDWR);
  ::shutdown(to, SHUT_RDWR);
}

}  // namespace crumb::transport

// This definition of connect is also called by the libraries of the test program.
extern "C" int connect(int fd, const sockaddr* address, socklen_t size) {
  using namespace crumb::transport;
  sockaddr_in to{};
  if (size != sizeof(to) || address->sa_family != AF_INET) return SystemConnect(fd, address, size);
  std::memcpy(&to, address, sizeof(to));
  const int error = errno;
  to.sin_port = htons(static_cast<uint16_t>(TcpProxy::PortInstead(ntohs(to.sin_port))));
  errno = error;
  return SystemConnect(fd, reinterpret_cast<const sockaddr*>(&to), size);
}
