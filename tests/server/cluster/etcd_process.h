// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <sys/types.h>

#include <string>

#include "tests/server/temp_folder.h"

namespace crumb::server {

// The system's etcd on loopback ports, in a folder of its own, which survives Stop.
class EtcdProcess {
 public:
  // Whether there is an etcd program.
  static bool Installed();

  EtcdProcess();
  ~EtcdProcess() { Stop(); }
  EtcdProcess(const EtcdProcess&) = delete;

  // Waits until it answers. False: it does not.
  bool Start();
  // SIGKILL.
  void Stop();
  // SIGSTOP and SIGCONT: slow beyond every deadline.
  void Freeze();
  void Thaw();

  const std::string& endpoint() const { return endpoint_; }

 private:
  const TempFolder folder_;
  std::string endpoint_;
  std::string peer_;
  pid_t pid_ = -1;
};

}  // namespace crumb::server
