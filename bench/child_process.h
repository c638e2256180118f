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

// A program started by this one, ended with it.
class ChildProcess {
 public:
  // Runs `argv[0]` (searched in PATH when it has no slash) with output into `log_path`.
  // kNotFound, kFailedPrecondition: it cannot be run.
  static absl::StatusOr<std::unique_ptr<ChildProcess>> Start(const std::vector<std::string>& argv,
                                                             const std::string& log_path);
  // Asks it to end, waits `kStopWait`, then kills it.
  ~ChildProcess();
  ChildProcess(const ChildProcess&) = delete;
  ChildProcess& operator=(const ChildProcess&) = delete;

  pid_t pid() const { return pid_; }
  // False once it has ended.
  bool Running();

 private:
  static constexpr Duration kStopWait = std::chrono::seconds(15);

  explicit ChildProcess(pid_t pid) : pid_(pid) {}

  pid_t pid_ = -1;
  bool ended_ = false;
};

// A TCP port on the loopback address that nobody listens at now.
absl::StatusOr<int> FreeLoopbackPort();

}  // namespace crumb::bench
