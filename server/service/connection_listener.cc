// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "server/service/connection_listener.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <linux/sockios.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <utility>

#include "common/errno_status.h"
#include "common/fd_channel.h"
#include "common/logging.h"
#include "common/status_macros.h"
#include "fmt/format.h"
#include "server/base/tcp_listener.h"

namespace crumb::server {
namespace {

// The kernel cuts this to net.core.somaxconn.
constexpr int kBacklog = 4096;
// Connections that are accepted at one listener before the others are looked at.
constexpr int kAcceptsAtOnce = 64;
// Looks at a connection during the time after which it is ended because its peer reads nothing. A
// peer that reads is never taken for one that does not unless its socket is as full at all of them.
constexpr int kLooksPerTimeout = 16;
// How long accepting pauses when descriptors have run out.
constexpr int kAcceptPauseMs = 200;
#ifndef SO_PASSRIGHTS
#define SO_PASSRIGHTS 83  // of Linux 6.16, newer than the C library's header
#endif

// Has the kernel refuse messages with descriptors (EPERM to the sender), on the connections of the
// listener too. gRPC takes none: the kernel would close them while one of gRPC's threads receives,
// and such a close waits for as long as its sender likes.
void RefuseDescriptors(int listener) {
  const int none = 0;
  if (::setsockopt(listener, SOL_SOCKET, SO_PASSRIGHTS, &none, sizeof(none)) == 0) return;
  LogWarning("descriptors sent to listen.unix can block threads of gRPC: Linux 6.16 refuses them");
}

// Connections in total: limits.connections_max, and at most half of the descriptors that the
// process may open.
uint64_t ConnectionsMax(const Limits& limits) {
  const auto wanted = static_cast<uint64_t>(limits.connections_max);
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0) return wanted;
  const uint64_t half = std::max<uint64_t>(limit.rlim_cur / 2, 1);
  if (half < wanted) {
    LogWarning("limits.connections_max is {}, half of the {} descriptors that crumbd may open",
               half, static_cast<uint64_t>(limit.rlim_cur));
  }
  return std::min(wanted, half);
}

}  // namespace

std::string PeerOf(int socket) {
  sockaddr_storage address{};
  socklen_t size = sizeof(address);
  if (::getpeername(socket, reinterpret_cast<sockaddr*>(&address), &size) != 0) return "";
  if (address.ss_family == AF_UNIX) {
    const auto credentials = CredentialsOf(socket);
    return credentials.ok() ? fmt::format("uid {}", credentials->uid) : "";
  }
  std::array<char, INET6_ADDRSTRLEN> text{};
  if (address.ss_family == AF_INET) {
    const auto& v4 = reinterpret_cast<const sockaddr_in&>(address);
    return ::inet_ntop(AF_INET, &v4.sin_addr, text.data(), text.size());
  }
  in6_addr v6 = reinterpret_cast<const sockaddr_in6&>(address).sin6_addr;
  if (IN6_IS_ADDR_V4MAPPED(&v6)) {
    return ::inet_ntop(AF_INET, &v6.s6_addr[12], text.data(), text.size());
  }
  std::fill(std::begin(v6.s6_addr) + 8, std::end(v6.s6_addr), 0);
  return ::inet_ntop(AF_INET6, &v6, text.data(), text.size());
}

ConnectionListener::ConnectionListener(const Limits& limits, ServerMetrics& metrics)
    : metrics_(metrics),
      unread_max_(limits.stream_progress_timeout),
      places_(ConnectionsMax(limits), limits.connections_peer_percent) {}

ConnectionListener::~ConnectionListener() { Stop(); }

absl::Status ConnectionListener::ListenUnix(const std::string& path) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path, path.data(), std::min(path.size(), sizeof(address.sun_path) - 1));
  UniqueFd fd(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!fd.valid()) return ErrnoStatus(errno, "a socket for " + path);
  ::unlink(path.c_str());  // a crumbd that was killed left it
  if (::bind(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0) {
    return ErrnoStatus(errno, "listening at " + path);
  }
  path_ = path;
  // Before it listens, so that the file's first mode lets no connection in.
  if (::chmod(path.c_str(), 0660) != 0) return ErrnoStatus(errno, "setting the mode of " + path);
  RefuseDescriptors(fd.get());
  if (::listen(fd.get(), kBacklog) != 0) return ErrnoStatus(errno, "listening at " + path);
  local_ = std::move(fd);
  return absl::OkStatus();
}

absl::Status ConnectionListener::ListenTcp(HostPort& place) {
  CRUMB_ASSIGN_OR_RETURN(tcp_,
                         server::ListenTcp("listen.tcp", place, WildcardListens::kBothFamilies));
  return absl::OkStatus();
}

absl::Status ConnectionListener::Start(std::unique_ptr<Acceptor> local,
                                       std::unique_ptr<Acceptor> tcp) {
  local_acceptor_ = std::move(local);
  tcp_acceptor_ = std::move(tcp);
  wake_ = UniqueFd(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!wake_.valid()) return ErrnoStatus(errno, "eventfd");
  thread_ = Thread("crumb-accept", [this] { Run(); });
  return absl::OkStatus();
}

void ConnectionListener::Stop() {
  if (stopping_.exchange(true)) return;
  if (wake_.valid()) {
    const uint64_t one = 1;
    [[maybe_unused]] const ssize_t written = ::write(wake_.get(), &one, sizeof(one));
  }
  thread_.Join();
  local_.Reset();
  tcp_.clear();
  if (!path_.empty()) ::unlink(path_.c_str());
}

void ConnectionListener::Disconnect() {
  for (const auto& [descriptor, connection] : connections_) End(descriptor, connection);
}

void ConnectionListener::End(int descriptor, const Connection& connection) {
  // gRPC may close the descriptor at any time, and its number may become another file's: the file
  // that is looked at and the one that is ended are the same, because the copy keeps it.
  const UniqueFd copy(::fcntl(descriptor, F_DUPFD_CLOEXEC, 0));
  struct stat file {};
  if (copy.valid() && ::fstat(copy.get(), &file) == 0 && file.st_dev == connection.device &&
      file.st_ino == connection.inode) {
    ::shutdown(copy.get(), SHUT_RDWR);
  }
}

void ConnectionListener::EndUnread() {
  const TimePoint now = Clock::Real().Now();
  for (auto& [descriptor, connection] : connections_) {
    int unread = 0;
    pollfd writable{descriptor, POLLOUT, 0};
    // Fails if gRPC has closed the connection, whose number may have become another file's.
    if (::ioctl(descriptor, SIOCOUTQ, &unread) != 0 || ::poll(&writable, 1, 0) != 0) unread = 0;
    if (unread == 0 || unread != connection.unread_bytes) {
      connection.unread_bytes = unread;
      connection.unread_since = now;
    } else if (now - connection.unread_since >= unread_max_) {
      metrics_.stalled_connections.Add();
      End(descriptor, connection);
      connection.unread_bytes = 0;
    }
  }
}

void ConnectionListener::Run() {
  std::vector<pollfd> waiting = {{wake_.get(), POLLIN, 0}, {local_.get(), POLLIN, 0}};
  for (const UniqueFd& listener : tcp_) waiting.push_back({listener.get(), POLLIN, 0});
  TimePoint look = Clock::Real().Now();
  while (!stopping_.load()) {
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(look - Clock::Real().Now());
    const int wait_ms =
        connections_.empty() ? -1 : static_cast<int>(std::max<int64_t>(left.count(), 0));
    if (::poll(waiting.data(), waiting.size(), wait_ms) < 0) continue;
    if (Clock::Real().Now() >= look) {
      Sweep();
      EndUnread();
      look = Clock::Real().Now() + unread_max_ / kLooksPerTimeout;
    }
    bool has_descriptors = true;
    if (waiting[1].revents != 0) has_descriptors = Accept(local_, /*local=*/true);
    for (size_t i = 0; i < tcp_.size(); ++i) {
      if (waiting[i + 2].revents != 0) has_descriptors &= Accept(tcp_[i], /*local=*/false);
    }
    // New connections wait in the listeners' backlogs meanwhile.
    if (!has_descriptors) ::poll(waiting.data(), 1, kAcceptPauseMs);
  }
}

bool ConnectionListener::Accept(const UniqueFd& listener, bool local) {
  for (int accepted = 0; accepted < kAcceptsAtOnce; ++accepted) {
    UniqueFd connection = AcceptConnection(listener.get());
    if (connection.valid()) {
      Admit(std::move(connection), local);
      continue;
    }
    if (errno == ECONNABORTED || errno == EINTR) continue;
    return errno != EMFILE && errno != ENFILE && errno != ENOMEM && errno != ENOBUFS;
  }
  return true;
}

void ConnectionListener::Admit(UniqueFd connection, bool local) {
  const std::string peer = PeerOf(connection.get());
  struct stat file {};
  if (peer.empty() || ::fstat(connection.get(), &file) != 0) return;  // it has ended already
  // gRPC has closed the connection that had this descriptor.
  if (const auto before = connections_.find(connection.get()); before != connections_.end()) {
    places_.Give(before->second.peer);
    connections_.erase(before);
  }
  const TenantBudget::Taken taken = Take(peer);
  if (taken != TenantBudget::Taken::kYes) {
    return metrics_.Reject(Rejection::kConnections, taken);  // closes it
  }
  connections_[connection.get()] = {peer, file.st_dev, file.st_ino};
  Acceptor::NewConnectionParameters parameters;
  parameters.fd = connection.Release();
  (local ? local_acceptor_ : tcp_acceptor_)->HandleNewConnection(&parameters);
}

TenantBudget::Taken ConnectionListener::Take(const std::string& peer) {
  const TenantBudget::Taken taken = places_.Take(peer);
  if (taken == TenantBudget::Taken::kYes) return taken;
  Sweep();
  return places_.Take(peer);
}

void ConnectionListener::Sweep() {
  for (auto it = connections_.begin(); it != connections_.end();) {
    const Connection& connection = it->second;
    struct stat file {};
    if (::fstat(it->first, &file) == 0 && file.st_dev == connection.device &&
        file.st_ino == connection.inode) {
      ++it;
      continue;
    }
    places_.Give(connection.peer);
    it = connections_.erase(it);
  }
}

}  // namespace crumb::server
