// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "server/session/pidfd.h"

#include <poll.h>
#include <unistd.h>

#include <array>
#include <charconv>
#include <fstream>
#include <string>

namespace crumb::server {
namespace {

// The kernel's name of every pidfd.
constexpr std::string_view kPidfdLink = "anon_inode:[pidfd]";
constexpr std::string_view kPidLine = "Pid:\t";

// The process of a pidfd as /proc tells it; 0 when it is outside our namespace, -1 when it is gone.
int PidOf(int fd) {
  std::ifstream info("/proc/self/fdinfo/" + std::to_string(fd));
  std::string line;
  while (std::getline(info, line)) {
    if (!line.starts_with(kPidLine)) continue;
    int pid = -1;
    std::from_chars(line.data() + kPidLine.size(), line.data() + line.size(), pid);
    return pid;
  }
  return -1;
}

}  // namespace

absl::Status CheckPidfd(int fd, int pid) {
  std::array<char, 64> link;
  const std::string path = "/proc/self/fd/" + std::to_string(fd);
  const ssize_t size = ::readlink(path.c_str(), link.data(), link.size());
  if (size < 0 || std::string_view(link.data(), static_cast<size_t>(size)) != kPidfdLink) {
    return absl::InvalidArgumentError("the descriptor is no pidfd");
  }
  pollfd ended{fd, POLLIN, 0};
  if (::poll(&ended, 1, 0) != 0) {
    return absl::InvalidArgumentError("the pidfd's process has ended");
  }
  const int named = PidOf(fd);
  if (pid != 0 && named != 0 && named != pid) {
    return absl::InvalidArgumentError("the pidfd is not the sender's own");
  }
  return absl::OkStatus();
}

}  // namespace crumb::server
