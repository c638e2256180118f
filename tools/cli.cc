// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "tools/cli.h"

#include <filesystem>
#include <iostream>
#include <sstream>
#include <utility>
#include <vector>

#include "CLI/CLI.hpp"

namespace crumb::tools {
namespace {

// The message for a command line that names none of `app`'s subcommands.
std::string SubcommandsText(const CLI::App& app) {
  const std::vector<std::string> typed = app.remaining();
  std::string text = typed.empty() ? "a subcommand is required: one of"
                                   : "'" + typed.front() + "' is no subcommand: they are";
  const char* separator = " ";
  for (const CLI::App* sub : app.get_subcommands(nullptr)) {
    text += std::exchange(separator, ", ") + sub->get_name();
  }
  return text;
}

}  // namespace

std::optional<EarlyExit> ParseArguments(CLI::App& app, int argc, const char* const* argv) {
  try {
    app.parse(argc, argv);
    return std::nullopt;
  } catch (const CLI::ParseError& error) {
    std::ostringstream out, ignored;
    if (app.exit(error, out, ignored) == 0) return EarlyExit{0, out.str(), ""};
    const std::string name = app.get_name();
    const bool no_subcommand =
        app.get_require_subcommand_min() > 0 && app.get_subcommands().empty();
    return EarlyExit{kExitUsage, "",
                     name + ": " + (no_subcommand ? SubcommandsText(app) : error.what()) +
                         " (see " + name + " --help)\n"};
  }
}

int ReportExit(const EarlyExit& exit) {
  std::cout << exit.out;
  std::cerr << exit.error;
  return exit.code;
}

std::string ProgramFolder() {
  std::error_code error;
  return std::filesystem::read_symlink("/proc/self/exe", error).parent_path().string();
}

}  // namespace crumb::tools
