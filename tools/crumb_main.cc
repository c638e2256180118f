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
  crumb::SetLogSeverity(crumb::Severity::kOff);  // the command reports errors, once
  const auto parsed = crumb::tools::ParseCommandLine(argc, argv);
  if (const auto* exit = std::get_if<crumb::tools::EarlyExit>(&parsed)) {
    return crumb::tools::ReportExit(*exit);
  }
  const auto& line = std::get<crumb::tools::CommandLine>(parsed);
  if (std::holds_alternative<crumb::tools::StatsCommand>(line.command)) {
    std::signal(SIGINT, [](int) {
      interrupted = 1;
    });  // ends `stats --watch`; other commands keep the default action
  }
  return crumb::tools::RunCommandLine(
      line, [] { return interrupted != 0; }, std::cout, std::cerr);
}
