// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "tests/transport/peer_process.h"

#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>

namespace crumb::transport {

std::unique_ptr<PeerProcess> PeerProcess::Start(bool rendezvous) {
  int pipe[2];
  if (::pipe(pipe) != 0) return nullptr;
  posix_spawn_file_actions_t actions;
  ::posix_spawn_file_actions_init(&actions);
  ::posix_spawn_file_actions_adddup2(&actions, pipe[1], STDOUT_FILENO);
  ::posix_spawn_file_actions_addclose(&actions, pipe[0]);
  ::posix_spawn_file_actions_addclose(&actions, pipe[1]);
  char program[] = CRUMB_SERVING_PEER, argument[] = "rendezvous";
  char* const argv[] = {program, rendezvous ? argument : nullptr, nullptr};
  auto peer = std::make_unique<PeerProcess>();
  const int error = ::posix_spawn(&peer->pid_, program, &actions, nullptr, argv, environ);
  ::posix_spawn_file_actions_destroy(&actions);
  ::close(pipe[1]);
  FILE* out = ::fdopen(pipe[0], "r");
  char line[128] = "";
  const bool started = error == 0 && std::fgets(line, sizeof(line), out) != nullptr;
  std::fclose(out);
  if (error != 0) peer->pid_ = -1;
  if (!started) return nullptr;
  peer->address_ = line;
  peer->address_.pop_back();
  return peer;
}

PeerProcess::~PeerProcess() { Kill(); }

void PeerProcess::Signal(int signal) { ::kill(pid_, signal); }

void PeerProcess::Kill() {
  if (pid_ <= 0) return;
  ::kill(pid_, SIGKILL);
  ::waitpid(pid_, nullptr, 0);
  pid_ = -1;
}

}  // namespace crumb::transport
