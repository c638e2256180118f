// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "common/recent_log.h"

namespace crumb {

RecentLog& RecentLog::Process() {
  static RecentLog& log = *new RecentLog;  // other threads may log while the process ends
  return log;
}

void RecentLog::Add(Severity severity, const std::string& text) {
  if (severity != Severity::kWarning && severity != Severity::kError) return;
  MutexLock lock(&mutex_);
  ++counts_[severity == Severity::kError ? 1 : 0];
  if (problems_.size() == kProblemsMax) problems_.pop_front();
  problems_.push_back({std::chrono::system_clock::now(), severity, text.substr(0, kTextBytesMax)});
}

std::vector<LoggedProblem> RecentLog::Problems() const {
  MutexLock lock(&mutex_);
  return {problems_.begin(), problems_.end()};
}

uint64_t RecentLog::Count(Severity severity) const {
  MutexLock lock(&mutex_);
  if (severity == Severity::kWarning) return counts_[0];
  return severity == Severity::kError ? counts_[1] : 0;
}

}  // namespace crumb
