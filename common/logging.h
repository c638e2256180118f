// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <utility>

#include "absl/status/status.h"
#include "fmt/format.h"

// One line a call to standard error: time, severity, thread, text. Log once, where a thing is
// handled or dropped. Thread-safe. Format strings are fmt's. Whatever a line is made of, it stays
// one line without escape sequences and of bounded length: LogLine passes it through Printable().
namespace crumb {

enum class Severity { kDebug, kInfo, kWarning, kError, kOff };

// Lines below `severity` are dropped. kInfo at start.
void SetLogSeverity(Severity severity);

// kInvalidArgument for anything but debug, info, warning, error, off.
absl::Status SetLogSeverity(const std::string& name);

void LogLine(Severity severity, const std::string& text);
bool LogEnabled(Severity severity);

template <typename... Args>
void Log(Severity severity, fmt::format_string<Args...> format, Args&&... args) {
  if (LogEnabled(severity)) LogLine(severity, fmt::format(format, std::forward<Args>(args)...));
}
template <typename... Args>
void LogDebug(fmt::format_string<Args...> format, Args&&... args) {
  Log(Severity::kDebug, format, std::forward<Args>(args)...);
}
template <typename... Args>
void LogInfo(fmt::format_string<Args...> format, Args&&... args) {
  Log(Severity::kInfo, format, std::forward<Args>(args)...);
}
template <typename... Args>
void LogWarning(fmt::format_string<Args...> format, Args&&... args) {
  Log(Severity::kWarning, format, std::forward<Args>(args)...);
}
template <typename... Args>
void LogError(fmt::format_string<Args...> format, Args&&... args) {
  Log(Severity::kError, format, std::forward<Args>(args)...);
}

}  // namespace crumb
