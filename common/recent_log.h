// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <deque>
#include <string>
#include <vector>

#include "common/logging.h"
#include "common/mutex.h"

namespace crumb {

// A line that was logged, warning or error.
struct LoggedProblem {
  std::chrono::system_clock::time_point when;
  Severity severity = Severity::kWarning;
  std::string text;  // cut to RecentLog::kTextBytesMax
};

// The newest warnings and errors of the log, for the status page. Thread-safe.
class RecentLog {
 public:
  static constexpr size_t kProblemsMax = 64;
  static constexpr size_t kTextBytesMax = 512;

  // The log of this process: every line that LogLine wrote.
  static RecentLog& Process();

  // Lines below a warning are ignored.
  void Add(Severity severity, const std::string& text);
  // Oldest first.
  std::vector<LoggedProblem> Problems() const;
  // Lines of this severity since the start, those that were dropped from here too.
  uint64_t Count(Severity severity) const;

 private:
  mutable Mutex mutex_;
  std::deque<LoggedProblem> problems_ ABSL_GUARDED_BY(mutex_);
  std::array<uint64_t, 2> counts_ ABSL_GUARDED_BY(mutex_) = {0, 0};  // warnings, errors
};

}  // namespace crumb
