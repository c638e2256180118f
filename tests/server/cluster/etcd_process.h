// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <sys/types.h>

#include <optional>
#include <string>

#include "server/cluster/etcd/etcd_access.h"
#include "tests/common/temporary_folder.h"

namespace crumb::server {

// The system's etcd on loopback ports, in a folder of its own, which survives Stop.
class EtcdProcess {
 public:
  struct Settings {
    int64_t quota_bytes = 0;  // limit of its database; 0: etcd's default
    // TLS for clients; empty: none. A set `ca`: clients need a certificate that it signed.
    std::string cert;
    std::string key;
    std::string ca;
    EtcdAccess access;  // credentials of the call with which Start checks that etcd responds
  };

  // Whether there is an etcd program.
  static bool Installed();

  EtcdProcess() : EtcdProcess(Settings{}) {}
  explicit EtcdProcess(const Settings& settings);
  ~EtcdProcess() { Stop(); }
  EtcdProcess(const EtcdProcess&) = delete;

  // Blocks until etcd responds. Returns false if it does not in time.
  bool Start() { return Start(settings_.access); }
  bool Start(const EtcdAccess& access);
  // SIGKILL.
  void Stop();
  // SIGSTOP and SIGCONT: slow beyond every deadline.
  void Freeze();
  void Thaw();

  // Forgets everything; between Stop and Start.
  void Wipe();

  // Calls the JSON gateway of etcd without TLS. Returns the response, or none if the call failed.
  std::optional<std::string> Post(const std::string& path, const std::string& json) const;
  // Puts until its space is used up, and makes room again. False: that did not work.
  bool Fill();
  bool MakeRoom();

  const std::string& endpoint() const { return endpoint_; }

 private:
  const Settings settings_;
  const TemporaryFolder folder_;
  std::string endpoint_;
  std::string peer_;
  pid_t pid_ = -1;
  int filled_ = 0;
};

}  // namespace crumb::server
