// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include <csignal>
#include <iostream>

#include "common/logging.h"
#include "tools/command_line.h"
#include "tools/commands.h"

namespace {

volatile std::sig_atomic_t interrupted = 0;

}  // namespace

int main(int argc, char** argv) {
  crumb::SetLogSeverity(crumb::Severity::kOff);  // what goes wrong is said once, by the command
  std::signal(SIGINT, [](int) { interrupted = 1; });
  const auto parsed = crumb::tools::ParseCommandLine(argc, argv);
  if (const auto* exit = std::get_if<crumb::tools::EarlyExit>(&parsed)) {
    std::cout << exit->out;
    std::cerr << exit->error;
    return exit->code;
  }
  return crumb::tools::RunCommandLine(
      std::get<crumb::tools::CommandLine>(parsed), [] { return interrupted != 0; }, std::cout,
      std::cerr);
}
