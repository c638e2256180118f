// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "tests/server/cluster/etcd_process.h"

#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <iostream>
#include <vector>

#include "httplib.h"
#include "server/cluster/etcd/etcd_client.h"
#include "tests/common/eventually.h"
#include "tests/server/cluster/test_nodes.h"

extern char** environ;

namespace crumb::server {

bool EtcdProcess::Installed() { return ::access("/usr/bin/etcd", X_OK) == 0; }

EtcdProcess::EtcdProcess(const Settings& settings)
    : settings_(settings),
      endpoint_("127.0.0.1:" + std::to_string(FreePort())),
      peer_("http://127.0.0.1:" + std::to_string(FreePort())) {}

bool EtcdProcess::Start(const EtcdAccess& access) {
  const std::string client = (settings_.cert.empty() ? "http://" : "https://") + endpoint_;
  std::vector<std::string> words = {"/usr/bin/etcd",
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
  if (settings_.quota_bytes > 0) {
    words.push_back("--quota-backend-bytes=" + std::to_string(settings_.quota_bytes));
  }
  if (!settings_.cert.empty()) {
    words.insert(words.end(), {"--cert-file=" + settings_.cert, "--key-file=" + settings_.key});
  }
  if (!settings_.ca.empty()) {
    words.insert(words.end(), {"--client-cert-auth", "--trusted-ca-file=" + settings_.ca});
  }
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
  const auto client_of = EtcdClient::Make({endpoint_}, std::chrono::seconds(2), access);
  absl::Status last;
  const bool responds = Eventually([&] {
    int64_t revision = 0;
    last = client_of->Range("/crumb/", &revision).status();
    return last.ok();
  });
  if (!responds) std::cerr << last << "\n" << std::ifstream(log).rdbuf();
  return responds;
}

void EtcdProcess::Stop() {
  if (pid_ < 0) return;
  ::kill(pid_, SIGKILL);
  ::waitpid(pid_, nullptr, 0);
  pid_ = -1;
}

void EtcdProcess::Wipe() { std::filesystem::remove_all(folder_.path() + "/etcd"); }

std::optional<std::string> EtcdProcess::Post(const std::string& path,
                                             const std::string& json) const {
  httplib::Client client("http://" + endpoint_);
  const auto result = client.Post(path, json, "application/json");
  if (!result || result->status != 200) return std::nullopt;
  return result->body;
}

bool EtcdProcess::Fill() {
  const auto client = EtcdClient::Make({endpoint_}, std::chrono::seconds(5));
  const std::string block(64 << 10, 'x');
  for (int i = 0; i < 4096; ++i) {
    const absl::Status put = client->Put("/filling/" + std::to_string(i), block, 0);
    filled_ = i + 1;
    if (absl::IsResourceExhausted(put)) return true;
  }
  return false;
}

bool EtcdProcess::MakeRoom() {
  const auto client = EtcdClient::Make({endpoint_}, std::chrono::seconds(5));
  for (int i = 0; i < filled_; ++i) {
    if (!client->Delete("/filling/" + std::to_string(i)).ok()) return false;
  }
  int64_t revision = 0;
  if (!client->Range("/filling/", &revision).ok()) return false;
  const std::string upto = std::to_string(revision);
  if (!Post("/v3/kv/compaction", R"({"revision": )" + upto + R"(, "physical": true})") ||
      !Post("/v3/maintenance/defragment", "{}")) {
    return false;
  }
  const auto alarms = Post("/v3/maintenance/alarm", R"({"action": "GET"})");
  const std::string name = R"("memberID":")";
  const size_t at = alarms ? alarms->find(name) : std::string::npos;
  if (at == std::string::npos) return false;
  const size_t begin = at + name.size();
  const std::string member = alarms->substr(begin, alarms->find('"', begin) - begin);
  return Post("/v3/maintenance/alarm",
              R"({"action": "DEACTIVATE", "alarm": "NOSPACE", "memberID": ")" + member + "\"}")
      .has_value();
}

void EtcdProcess::Freeze() { ::kill(pid_, SIGSTOP); }
void EtcdProcess::Thaw() { ::kill(pid_, SIGCONT); }

}  // namespace crumb::server
