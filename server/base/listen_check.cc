// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "server/base/listen_check.h"

#include <netdb.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <memory>

#include "common/errno_status.h"
#include "common/status_macros.h"
#include "common/unique_fd.h"

namespace crumb::server {
namespace {

// Returns whether a process listens at a Unix socket of this type.
bool Responds(const sockaddr_un& address, int type) {
  const UniqueFd fd(::socket(AF_UNIX, type | SOCK_CLOEXEC, 0));
  return fd.valid() &&
         ::connect(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0;
}

}  // namespace

absl::Status CheckUnixSocketFree(const std::string& path) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (path.empty() || path.size() >= sizeof(address.sun_path)) {
    return absl::InvalidArgumentError("socket path '" + path + "' is empty or longer than " +
                                      std::to_string(sizeof(address.sun_path) - 1) + " bytes");
  }
  std::memcpy(address.sun_path, path.data(), path.size());
  const size_t slash = path.rfind('/');
  const std::string folder = slash == std::string::npos ? "." : path.substr(0, slash + 1);
  struct stat found;
  if (::stat(folder.c_str(), &found) != 0 || !S_ISDIR(found.st_mode)) {
    return absl::NotFoundError("socket folder " + folder + " does not exist: create it");
  }
  if (::access(folder.c_str(), W_OK | X_OK) != 0) {
    return ErrnoStatus(errno, "socket folder " + folder);
  }
  if (::lstat(path.c_str(), &found) != 0) return absl::OkStatus();
  if (!S_ISSOCK(found.st_mode)) {
    return absl::FailedPreconditionError(path + " exists and is not a socket");
  }
  if (Responds(address, SOCK_STREAM) || Responds(address, SOCK_SEQPACKET)) {
    return absl::AlreadyExistsError("another process listens at " + path);
  }
  return absl::OkStatus();
}

absl::Status CheckTcpFree(const std::string& key, const HostPort& address) {
  const std::string place = key + " " + address.host + ":" + std::to_string(address.port);
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_PASSIVE;
  addrinfo* list = nullptr;
  const int error =
      ::getaddrinfo(address.host.c_str(), std::to_string(address.port).c_str(), &hints, &list);
  if (error != 0) return absl::InvalidArgumentError(place + ": " + ::gai_strerror(error));
  const std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)> owner(list, ::freeaddrinfo);
  for (const addrinfo* entry = list; entry != nullptr; entry = entry->ai_next) {
    const UniqueFd fd(::socket(entry->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0));
    if (!fd.valid()) continue;  // a family that this kernel lacks
    const int on = 1;
    ::setsockopt(fd.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
    if (::bind(fd.get(), entry->ai_addr, entry->ai_addrlen) != 0 || ::listen(fd.get(), 1) != 0) {
      return ErrnoStatus(errno, place);
    }
  }
  return absl::OkStatus();
}

}  // namespace crumb::server
