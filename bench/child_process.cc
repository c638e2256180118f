// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "bench/child_process.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <signal.h>
#include <spawn.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <thread>

#include "common/errno_status.h"
#include "common/status_macros.h"
#include "common/unique_fd.h"

namespace crumb::bench {

absl::StatusOr<std::unique_ptr<ChildProcess>> ChildProcess::Start(
    const std::vector<std::string>& argv, const std::string& log_path) {
  std::vector<char*> words;
  for (const std::string& word : argv) words.push_back(const_cast<char*>(word.c_str()));
  words.push_back(nullptr);
  posix_spawn_file_actions_t actions;
  ::posix_spawn_file_actions_init(&actions);
  ::posix_spawn_file_actions_addopen(&actions, STDOUT_FILENO, log_path.c_str(),
                                     O_WRONLY | O_CREAT | O_APPEND, 0600);
  ::posix_spawn_file_actions_adddup2(&actions, STDOUT_FILENO, STDERR_FILENO);
  pid_t pid = -1;
  const int error = ::posix_spawnp(&pid, words[0], &actions, nullptr, words.data(), environ);
  ::posix_spawn_file_actions_destroy(&actions);
  if (error != 0) return ErrnoStatus(error, "start " + argv[0]);
  return std::unique_ptr<ChildProcess>(new ChildProcess(pid));
}

ChildProcess::~ChildProcess() {
  if (!Running()) return;
  ::kill(pid_, SIGTERM);
  const TimePoint end = Clock::Real().Now() + kStopWait;
  while (Running() && Clock::Real().Now() < end) std::this_thread::sleep_for(kPollInterval);
  if (ended_) return;
  ::kill(pid_, SIGKILL);
  ::waitpid(pid_, nullptr, 0);
}

absl::StatusOr<std::vector<std::unique_ptr<ChildProcess>>> StartBusyLoops(size_t count) {
  // It looks for its parent seldom: the kernel's part of the loop is small.
  constexpr const char* kLoop =
      "while kill -0 $PPID; do i=0; while [ $i -lt 100000 ]; do i=$((i+1)); done; done";
  std::vector<std::unique_ptr<ChildProcess>> loops;
  for (size_t i = 0; i < count; ++i) {
    CRUMB_ASSIGN_OR_RETURN(loops.emplace_back(),
                           ChildProcess::Start({"/bin/sh", "-c", kLoop}, "/dev/null"));
  }
  return loops;
}

bool ChildProcess::Running() {
  if (!ended_) ended_ = ::waitpid(pid_, nullptr, WNOHANG) != 0;
  return !ended_;
}

absl::StatusOr<int> FreeLoopbackPort() {
  const UniqueFd socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof(address);
  auto* generic = reinterpret_cast<sockaddr*>(&address);
  if (!socket.valid() || ::bind(socket.get(), generic, size) != 0 ||
      ::getsockname(socket.get(), generic, &size) != 0) {
    return ErrnoStatus(errno, "find a free port");
  }
  return ntohs(address.sin_port);
}

}  // namespace crumb::bench
