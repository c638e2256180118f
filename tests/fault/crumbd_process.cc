// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "tests/fault/crumbd_process.h"

#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <thread>

#include "tests/fault/known_pages.h"

extern char** environ;

namespace crumb::fault {
namespace {

constexpr auto kStartWait = std::chrono::seconds(30);

// Tests lie in tests/ beside bin/, in the build folder or wherever both were copied to.
std::string CrumbdProgram() {
  std::error_code ignored;
  const auto self = std::filesystem::read_symlink("/proc/self/exe", ignored);
  return (self.parent_path().parent_path() / "bin" / "crumbd").string();
}

}  // namespace

CrumbdProcess::CrumbdProcess(const std::string& folder, const StoreSizes& sizes)
    : folder_(folder), control_group_(sizes.control_group) {
  std::ofstream config(folder_ + "/crumbd.yaml");
  config << "listen:\n  socket_dir: " << folder_ << "\n  tcp: \"" << sizes.tcp
         << "\"\nadmin:\n  listen: \"\"\n"
         << "store:\n  host:\n    bytes_max: " << sizes.host_bytes
         << "\n    slab_bytes: " << (sizes.slab_bytes == 0 ? sizes.host_bytes : sizes.slab_bytes)
         << "\n  ssd:\n    path: \"" << (sizes.ssd_bytes == 0 ? "" : ssd_path())
         << "\"\n    bytes_max: " << std::max<uint64_t>(sizes.ssd_bytes, 16 << 20) << "\n"
         << sizes.more;
}

CrumbdProcess::~CrumbdProcess() { Kill(); }

pid_t CrumbdProcess::Spawn(const std::vector<std::string>& flags) const {
  const std::string log = folder_ + "/crumbd.log";
  const std::string config = folder_ + "/crumbd.yaml";
  const std::string program = CrumbdProgram();
  posix_spawn_file_actions_t actions;
  ::posix_spawn_file_actions_init(&actions);
  ::posix_spawn_file_actions_addopen(&actions, 2, log.c_str(), O_WRONLY | O_CREAT | O_APPEND, 0600);
  // It is in its group before it takes any memory.
  const std::string join = control_group_.empty() ? "/dev/null" : control_group_ + "/cgroup.procs";
  std::vector<const char*> arguments = {
      "/bin/sh",  "-c",          "echo $$ > \"$0\" && exec \"$@\"", join.c_str(), program.c_str(),
      "--config", config.c_str()};
  for (const std::string& flag : flags) arguments.push_back(flag.c_str());
  arguments.push_back(nullptr);
  pid_t pid = -1;
  const int error = ::posix_spawn(&pid, "/bin/sh", &actions, nullptr,
                                  const_cast<char**>(arguments.data()), environ);
  ::posix_spawn_file_actions_destroy(&actions);
  return error == 0 ? pid : -1;
}

pid_t CrumbdProcess::StartSuccessor(Successor successor) const {
  if (successor == Successor::kDetached) return Spawn({"--takeover", "--detach"});
  return Spawn({"--takeover"});
}

bool CrumbdProcess::WaitServing() const {
  const auto deadline = std::chrono::steady_clock::now() + kStartWait;
  while (!Serves()) {
    if (std::chrono::steady_clock::now() > deadline) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  return true;
}

bool CrumbdProcess::Start() {
  pid_ = Spawn({});
  if (pid_ < 0) return false;
  const auto deadline = std::chrono::steady_clock::now() + kStartWait;
  while (std::chrono::steady_clock::now() < deadline) {
    if (Serves()) return true;
    if (::waitpid(pid_, nullptr, WNOHANG) == pid_) {
      pid_ = -1;
      break;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  std::cerr << std::ifstream(folder_ + "/crumbd.log").rdbuf() << "crumbd does not serve\n";
  return false;
}

bool CrumbdProcess::Serves() const {
  auto client = Connect(folder_, "fault-probe");
  return client.ok() && (*client)->connected();
}

void CrumbdProcess::Kill() {
  if (pid_ < 0) return;
  ::kill(pid_, SIGKILL);
  ::waitpid(pid_, nullptr, 0);
  pid_ = -1;
}

int CrumbdProcess::Stop() {
  ::kill(pid_, SIGTERM);
  int status = 0;
  ::waitpid(pid_, &status, 0);
  pid_ = -1;
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

uint64_t HostCapacity(client::Client& client) {
  const auto stats = client.Stats();
  if (!stats.ok()) return 0;
  for (const auto& tier : stats->tiers) {
    if (tier.tier == client::Tier::kHost) return tier.capacity_bytes;
  }
  return 0;
}

int FaultRounds(int otherwise) {
  const char* rounds = std::getenv("CRUMB_FAULT_ROUNDS");
  return rounds == nullptr ? otherwise : std::atoi(rounds);
}

}  // namespace crumb::fault
