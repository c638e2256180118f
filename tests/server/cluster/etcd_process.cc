// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "tests/server/cluster/etcd_process.h"

#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <fstream>
#include <iostream>
#include <vector>

#include "server/cluster/etcd/etcd_client.h"
#include "tests/server/cluster/test_nodes.h"

extern char** environ;

namespace crumb::server {

bool EtcdProcess::Installed() { return ::access("/usr/bin/etcd", X_OK) == 0; }

EtcdProcess::EtcdProcess()
    : endpoint_("127.0.0.1:" + std::to_string(FreePort())),
      peer_("http://127.0.0.1:" + std::to_string(FreePort())) {}

bool EtcdProcess::Start() {
  const std::string client = "http://" + endpoint_;
  const std::vector<std::string> words = {"/usr/bin/etcd",
                                          "--data-dir",
                                          folder_.path() + "/etcd",
                                          "--listen-client-urls",
                                          client,
                                          "--advertise-client-urls",
                                          client,
                                          "--listen-peer-urls",
                                          peer_,
                                          "--initial-advertise-peer-urls",
                                          peer_,
                                          "--initial-cluster",
                                          "default=" + peer_};
  std::vector<char*> arguments;
  for (const std::string& word : words) arguments.push_back(const_cast<char*>(word.c_str()));
  arguments.push_back(nullptr);
  posix_spawn_file_actions_t actions;
  ::posix_spawn_file_actions_init(&actions);
  const std::string log = folder_.path() + "/etcd.log";
  ::posix_spawn_file_actions_addopen(&actions, 1, log.c_str(), O_WRONLY | O_CREAT | O_APPEND, 0600);
  ::posix_spawn_file_actions_adddup2(&actions, 1, 2);
  const int error =
      ::posix_spawn(&pid_, arguments[0], &actions, nullptr, arguments.data(), environ);
  ::posix_spawn_file_actions_destroy(&actions);
  if (error != 0) {
    pid_ = -1;
    return false;
  }
  const auto client_of = EtcdClient::Make({endpoint_}, std::chrono::milliseconds(200));
  absl::Status last;
  const bool answers = Eventually([&] {
    int64_t revision = 0;
    last = client_of->Range("/crumb/", &revision).status();
    return last.ok();
  });
  if (!answers) std::cerr << last << "\n" << std::ifstream(log).rdbuf();
  return answers;
}

void EtcdProcess::Stop() {
  if (pid_ < 0) return;
  ::kill(pid_, SIGKILL);
  ::waitpid(pid_, nullptr, 0);
  pid_ = -1;
}

void EtcdProcess::Freeze() { ::kill(pid_, SIGSTOP); }
void EtcdProcess::Thaw() { ::kill(pid_, SIGCONT); }

}  // namespace crumb::server
