// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "server/ready_notice.h"

#include <sys/socket.h>
#include <sys/un.h>

#include <cerrno>
#include <cstddef>
#include <cstring>

#include "common/errno_status.h"
#include "common/unique_fd.h"

namespace crumb::server {

absl::Status SendNotice(const std::string& socket, const std::string& state) {
  if (socket.empty()) return absl::OkStatus();
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if ((socket[0] != '/' && socket[0] != '@') || socket.size() >= sizeof(address.sun_path)) {
    return absl::InvalidArgumentError("NOTIFY_SOCKET is '" + socket +
                                      "', must be a path or @name of a Unix socket");
  }
  std::memcpy(address.sun_path, socket.data(), socket.size());
  if (socket[0] == '@') address.sun_path[0] = '\0';
  const auto size = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + socket.size());
  const UniqueFd fd(::socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  if (!fd.valid() || ::sendto(fd.get(), state.data(), state.size(), MSG_NOSIGNAL,
                              reinterpret_cast<const sockaddr*>(&address), size) < 0) {
    return ErrnoStatus(errno, "telling " + socket + " " + state);
  }
  return absl::OkStatus();
}

}  // namespace crumb::server
