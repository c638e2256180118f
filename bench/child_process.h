// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <sys/types.h>

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "common/clock.h"

namespace crumb::bench {

// Time between two looks at a process or a server that is awaited.
inline constexpr Duration kPollInterval = std::chrono::milliseconds(10);

// A child process, which the destructor ends.
class ChildProcess {
 public:
  // Runs `argv[0]` (searched in PATH if it has no slash) with its output in `log_path`. kNotFound,
  // kFailedPrecondition: the program cannot be run.
  static absl::StatusOr<std::unique_ptr<ChildProcess>> Start(const std::vector<std::string>& argv,
                                                             const std::string& log_path);
  // Sends SIGTERM, waits for at most kStopWait, then kills the process.
  ~ChildProcess();
  ChildProcess(const ChildProcess&) = delete;
  ChildProcess& operator=(const ChildProcess&) = delete;

  pid_t pid() const { return pid_; }
  // Returns false after the process has ended.
  bool Running();

 private:
  // The time that a crumbd takes at most to write its queued pages.
  static constexpr Duration kStopWait = std::chrono::seconds(15);

  explicit ChildProcess(pid_t pid) : pid_(pid) {}

  pid_t pid_ = -1;
  bool ended_ = false;
};

// Starts `count` processes that compute and never sleep, which stand for the other programs of a
// busy machine. They end with this process, or when the result is destroyed.
absl::StatusOr<std::vector<std::unique_ptr<ChildProcess>>> StartBusyLoops(size_t count);

// Returns a TCP port on the loopback address at which no process listens now.
absl::StatusOr<int> FreeLoopbackPort();

}  // namespace crumb::bench
