// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "common/logging.h"

#include <map>

#include "common/printable.h"
#include "common/recent_log.h"
#include "spdlog/sinks/stdout_color_sinks.h"
#include "spdlog/spdlog.h"

namespace crumb {
namespace {

// A logger of our own: the host process may use spdlog's default one for itself.
spdlog::logger& Logger() {
  static const auto logger = [] {
    auto made = std::make_shared<spdlog::logger>(
        "crumb", std::make_shared<spdlog::sinks::stderr_color_sink_mt>());
    made->set_pattern("%Y-%m-%dT%H:%M:%S.%e %^%l%$ [%t] %v");
    return made;
  }();
  return *logger;
}

spdlog::level::level_enum LevelOf(Severity severity) {
  switch (severity) {
    case Severity::kDebug:
      return spdlog::level::debug;
    case Severity::kInfo:
      return spdlog::level::info;
    case Severity::kWarning:
      return spdlog::level::warn;
    case Severity::kError:
      return spdlog::level::err;
    case Severity::kOff:
      return spdlog::level::off;
  }
  return spdlog::level::off;
}

}  // namespace

void SetLogSeverity(Severity severity) { Logger().set_level(LevelOf(severity)); }

absl::Status SetLogSeverity(const std::string& name) {
  static const std::map<std::string, Severity> kNames = {{"debug", Severity::kDebug},
                                                         {"info", Severity::kInfo},
                                                         {"warning", Severity::kWarning},
                                                         {"error", Severity::kError},
                                                         {"off", Severity::kOff}};
  const auto found = kNames.find(name);
  if (found == kNames.end()) {
    return absl::InvalidArgumentError("unknown log severity '" + name +
                                      "'; one of debug, info, warning, error, off");
  }
  SetLogSeverity(found->second);
  return absl::OkStatus();
}

bool LogEnabled(Severity severity) { return Logger().should_log(LevelOf(severity)); }

void LogLine(Severity severity, const std::string& text) {
  if (!LogEnabled(severity)) return;
  const std::string line = Printable(text);
  RecentLog::Process().Add(severity, line);
  Logger().log(LevelOf(severity), line);
}

}  // namespace crumb
