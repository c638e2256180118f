// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <string>

namespace crumb::fault {

// A folder below the temporary one, removed with this object.
class TemporaryFolder {
 public:
  TemporaryFolder();
  ~TemporaryFolder();
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;

  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

struct StoreSizes {
  uint64_t host_bytes = uint64_t{64} << 20;
  uint64_t ssd_bytes = uint64_t{512} << 20;
  std::string control_group = {};  // folder of the group that crumbd joins; empty: this process's
};

// The crumbd program on sockets and an SSD folder inside `folder`, which outlives it.
class CrumbdProcess {
 public:
  CrumbdProcess(const std::string& folder, const StoreSizes& sizes);
  // Kills what still runs.
  ~CrumbdProcess();
  CrumbdProcess(const CrumbdProcess&) = delete;
  CrumbdProcess& operator=(const CrumbdProcess&) = delete;

  // Starts it and waits until it serves. False, with its log on standard error: it does not.
  bool Start();
  // SIGKILL, and waits for the end.
  void Kill();
  // SIGTERM; the exit code.
  int Stop();

  const std::string& socket_dir() const { return folder_; }
  std::string ssd_path() const { return folder_ + "/ssd"; }
  pid_t pid() const { return pid_; }

 private:
  bool Serves() const;

  const std::string folder_;
  const std::string control_group_;
  pid_t pid_ = -1;
};

// Rounds of a fault test: the environment variable CRUMB_FAULT_ROUNDS, or `otherwise`.
int FaultRounds(int otherwise);

}  // namespace crumb::fault
