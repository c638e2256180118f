// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <string>
#include <vector>

#include "crumb/client.h"

namespace crumb::fault {

struct StoreSizes {
  uint64_t host_bytes = uint64_t{64} << 20;
  uint64_t slab_bytes = 0;                   // 0: one slab
  uint64_t ssd_bytes = uint64_t{512} << 20;  // 0: no SSD tier
  std::string more = {};                     // further lines of the configuration
  std::string tcp = {};                      // listen.tcp
  std::string control_group = {};  // folder of the group that crumbd joins; empty: this process's
};

// The crumbd program on sockets and an SSD folder inside `folder`, which outlives it.
class CrumbdProcess {
 public:
  CrumbdProcess(const std::string& folder, const StoreSizes& sizes);
  // Kills the process if it still runs.
  ~CrumbdProcess();
  CrumbdProcess(const CrumbdProcess&) = delete;
  CrumbdProcess& operator=(const CrumbdProcess&) = delete;

  // Starts it and waits until it serves. False, with its log on standard error: it does not.
  bool Start();
  // Starts another one that is to take over from this one, and returns at once: -1 on failure.
  // kDetached: it goes on in a process of its own, and the one that is returned ends.
  enum class Successor { kAttached, kDetached };
  pid_t StartSuccessor(Successor successor = Successor::kAttached) const;
  // The process that is followed from now on; the former one's end is the caller's.
  void Follow(pid_t pid) { pid_ = pid; }
  // Waits until a crumbd serves. Returns false when it takes too long.
  bool WaitServing() const;

  // SIGKILL, and waits for the end.
  void Kill();
  // SIGTERM; the exit code.
  int Stop();

  const std::string& socket_dir() const { return folder_; }
  std::string ssd_path() const { return folder_ + "/ssd"; }
  pid_t pid() const { return pid_; }

 private:
  bool Serves() const;
  pid_t Spawn(const std::vector<std::string>& flags) const;

  const std::string folder_;
  const std::string control_group_;
  pid_t pid_ = -1;
};

// Returns the bytes of host memory that crumbd reports; 0: it does not respond.
uint64_t HostCapacity(client::Client& client);

// Rounds of a fault test: the environment variable CRUMB_FAULT_ROUNDS, or `otherwise`.
int FaultRounds(int otherwise);

}  // namespace crumb::fault
