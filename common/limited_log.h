// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <unordered_map>
#include <utility>

#include "common/clock.h"
#include "common/logging.h"
#include "common/mutex.h"

// Log lines that callers can cause. Each kind of line, which is one format string, has a rate, so
// that no caller fills a disk or keeps threads busy with writing. Lines beyond it are not formatted
// but counted, and the next line of the kind says how many were left out.
namespace crumb {

// The rates of all kinds. Thread-safe.
class LogLimiter {
 public:
  // Lines of one kind that may be written at once, and one more after each kInterval.
  static constexpr int64_t kBurst = 100;
  static constexpr Duration kInterval = std::chrono::seconds(1);

  // This process's.
  static LogLimiter& Process();

  // Whether a line of the kind may be written at `now`; if so, `left_out` becomes the number of its
  // lines that were left out since the last one. A kind is the address of a format string, of which
  // a program has few.
  bool Admit(const char* kind, TimePoint now, uint64_t* left_out);

  // Lines of all kinds that were left out.
  uint64_t left_out() const;

 private:
  struct Kind {
    int64_t lines = kBurst;  // lines that may be written
    TimePoint since{};       // time at which `lines` was valid
    uint64_t left_out = 0;
  };

  mutable Mutex mutex_;
  std::unordered_map<const char*, Kind> kinds_ ABSL_GUARDED_BY(mutex_);
  uint64_t left_out_ ABSL_GUARDED_BY(mutex_) = 0;
};

template <typename... Args>
void LogLimited(Severity severity, fmt::format_string<Args...> format, Args&&... args) {
  if (!LogEnabled(severity)) return;
  uint64_t left_out = 0;
  const fmt::string_view kind = format;
  if (!LogLimiter::Process().Admit(kind.data(), Clock::Real().Now(), &left_out)) return;
  std::string line = fmt::format(format, std::forward<Args>(args)...);
  // In front: a long line is cut at its end.
  if (left_out > 0) line = fmt::format("({} lines like this were left out) {}", left_out, line);
  LogLine(severity, line);
}
template <typename... Args>
void LogInfoLimited(fmt::format_string<Args...> format, Args&&... args) {
  LogLimited(Severity::kInfo, format, std::forward<Args>(args)...);
}
template <typename... Args>
void LogWarningLimited(fmt::format_string<Args...> format, Args&&... args) {
  LogLimited(Severity::kWarning, format, std::forward<Args>(args)...);
}

}  // namespace crumb
