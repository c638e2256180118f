// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <iosfwd>
#include <string>

#include "absl/status/status.h"
#include "nlohmann/json.hpp"
#include "tools/command_line.h"
#include "tools/crumbd_connection.h"

namespace crumb::tools {

// What a command has to say, for people and for programs, and whether it did its work. Output and
// failure may come together: a damaged page is shown and is an error.
struct CommandResult {
  std::string text;
  nlohmann::json json;
  absl::Status status;
};

// Runs every command but `page inspect` and `stats --watch`'s repetition against `crumbd`.
CommandResult RunOnCrumbd(const Command& command, CrumbdConnection& crumbd);

CommandResult RunPageInspect(const PageInspectCommand& command);

// Prints `result` as `json` says. Returns the exit code.
int PrintResult(const CommandResult& result, bool json, std::ostream& out, std::ostream& error);

// Runs `line` to its end; returns the exit code. `interrupted` ends `stats --watch`.
int RunCommandLine(const CommandLine& line, const std::function<bool()>& interrupted,
                   std::ostream& out, std::ostream& error);

}  // namespace crumb::tools
