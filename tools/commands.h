// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <iosfwd>

#include "tools/command_line.h"
#include "tools/command_result.h"

namespace crumb::tools {

// Prints `result` as `json` says. Returns the exit code.
int PrintResult(const CommandResult& result, bool json, std::ostream& out, std::ostream& error);

// Runs `line` to its end; returns the exit code. `interrupted` ends `stats --watch`.
int RunCommandLine(const CommandLine& line, const std::function<bool()>& interrupted,
                   std::ostream& out, std::ostream& error);

}  // namespace crumb::tools
