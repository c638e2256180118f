// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "bench/child_process.h"
#include "common/config_visitor.h"

namespace crumb::bench {

// A folder in the temporary folder, which the destructor removes.
class ScratchFolder {
 public:
  static absl::StatusOr<std::unique_ptr<ScratchFolder>> Create();
  ~ScratchFolder();
  ScratchFolder(const ScratchFolder&) = delete;
  ScratchFolder& operator=(const ScratchFolder&) = delete;

  const std::string& path() const { return path_; }

 private:
  explicit ScratchFolder(std::string path) : path_(std::move(path)) {}

  std::string path_;
};

// Waits until `ready` returns true. kUnavailable: the program ended or takes too long; the message
// has the end of its log.
absl::Status WaitReady(const std::string& name, ChildProcess& process, const std::string& log,
                       const std::function<bool()>& ready);

// The settings of a crumbd that a workload starts.
struct CrumbdSettings {
  std::string program;  // path of crumbd
  ByteSize host_bytes{uint64_t{1} << 30};
  ByteSize slab_bytes{uint64_t{64} << 20};
  ByteSize ssd_bytes{0};  // 0: no SSD tier
  int ssd_threads = 4;
  std::string host_policy = "default";
};

// A crumbd with its sockets in a scratch folder and without admin port, which the destructor stops.
class CrumbdUnderTest {
 public:
  // Returns when crumbd serves. kUnavailable: it does not; the message has the end of its log.
  static absl::StatusOr<std::unique_ptr<CrumbdUnderTest>> Start(const CrumbdSettings& settings);

  const std::string& socket_dir() const { return folder_->path(); }
  std::string ssd_path() const { return folder_->path() + "/ssd"; }
  pid_t pid() const { return process_->pid(); }

 private:
  std::unique_ptr<ScratchFolder> folder_;  // outlives the process
  std::unique_ptr<ChildProcess> process_;
};

// A redis-server on a loopback port, without persistence, which the destructor stops.
class RedisUnderTest {
 public:
  static absl::StatusOr<std::unique_ptr<RedisUnderTest>> Start();

  int port() const { return port_; }
  pid_t pid() const { return process_->pid(); }

 private:
  std::unique_ptr<ScratchFolder> folder_;
  std::unique_ptr<ChildProcess> process_;
  int port_ = 0;
};

}  // namespace crumb::bench
