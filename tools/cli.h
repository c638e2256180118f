// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <optional>
#include <string>

namespace CLI {
class App;
}

// The command-line layer of the programs under tools/ and bench/. CLI11 describes the grammar; the
// functions here give all programs the same exit codes, the same one-line messages and the same
// way to find each other's files.
namespace crumb::tools {

// Exit codes: the program could not do its work; its arguments are wrong.
inline constexpr int kExitFailure = 1;
inline constexpr int kExitUsage = 2;

// The output of a program that ends before it does any work, because help or its version was
// requested (code 0) or because its arguments are wrong (kExitUsage, one line in `error`).
struct EarlyExit {
  int code = 0;
  std::string out;
  std::string error;
};

// Parses arguments, as main receives them, by `app`, whose name is the program's. Returns nothing
// if the program shall go on. Never throws. If no subcommand was given although `app` requires one,
// the message lists all of them.
std::optional<EarlyExit> ParseArguments(CLI::App& app, int argc, const char* const* argv);

// Writes both texts to standard output and standard error. Returns the exit code.
int ReportExit(const EarlyExit& exit);

// The folder of the running program's file. Programs of one build lie beside each other.
std::string ProgramFolder();

}  // namespace crumb::tools
