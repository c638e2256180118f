// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
// crumb-calls-bench times the Acquires of many clients at once (bench/calls_workload.h). Unless it
// is given the socket folder of a running crumbd, it starts the crumbd that lies beside it.
#include <chrono>
#include <cstdio>
#include <memory>
#include <string>
#include <variant>

#include "CLI/CLI.hpp"
#include "bench/calls_workload.h"
#include "bench/servers_under_test.h"
#include "common/status_macros.h"
#include "tools/cli.h"

namespace crumb::bench {
namespace {

// The largest prefix, in pages, that a client acquires: 16,384 pages are 2^20 tokens.
constexpr int kPagesMax = 16'384;
// The largest number of clients, each of which has a thread and a connection.
constexpr int kClientsMax = 1024;

struct Arguments {
  bool json = false;
  std::string crumbd = tools::ProgramFolder() + "/crumbd";
  CallsWorkload workload;
};

std::variant<Arguments, tools::EarlyExit> Parse(int argc, const char* const* argv) {
  Arguments arguments;
  CallsWorkload& workload = arguments.workload;
  double seconds = std::chrono::duration<double>(workload.duration).count();
  CLI::App app("Times the Acquires of many clients of one crumbd.", "crumb-calls-bench");
  app.add_flag("--json", arguments.json, "print one JSON object instead of a table");
  CLI::Option* socket_dir = app.add_option("--socket-dir", workload.socket_dir,
                                           "folder of a running crumbd's sockets; without it a "
                                           "crumbd is started in a temporary folder");
  app.add_option("--crumbd", arguments.crumbd, "the crumbd to start")
      ->excludes(socket_dir)
      ->capture_default_str();
  app.add_option("--clients", workload.clients, "numbers of clients, one measurement for each")
      ->delimiter(',')
      ->check(CLI::Range(1, kClientsMax))
      ->capture_default_str();
  app.add_option("--pages", workload.pages, "pages of the prefix that each client acquires")
      ->check(CLI::Range(1, kPagesMax))
      ->capture_default_str();
  app.add_option("--beside-pages", workload.beside_pages,
                 "pages of a prefix that one more client acquires all the time; 0: no such client")
      ->check(CLI::Range(0, kPagesMax))
      ->capture_default_str();
  app.add_option("--seconds", seconds, "duration of each measurement")
      ->check(CLI::Range(0.1, 3600.0))
      ->capture_default_str();
  if (auto exit = tools::ParseArguments(app, argc, argv)) return *std::move(exit);
  workload.duration = std::chrono::duration_cast<Duration>(std::chrono::duration<double>(seconds));
  return arguments;
}

absl::Status Run(Arguments& arguments) {
  std::unique_ptr<CrumbdUnderTest> crumbd;
  if (arguments.workload.socket_dir.empty()) {
    CRUMB_ASSIGN_OR_RETURN(crumbd, CrumbdUnderTest::Start({.program = arguments.crumbd}));
    arguments.workload.socket_dir = crumbd->socket_dir();
  }
  CRUMB_ASSIGN_OR_RETURN(const auto rows, RunCallsWorkload(arguments.workload));
  std::fputs((arguments.json ? CallsJson(rows) : CallsText(rows)).c_str(), stdout);
  return absl::OkStatus();
}

}  // namespace
}  // namespace crumb::bench

int main(int argc, char** argv) {
  auto parsed = crumb::bench::Parse(argc, argv);
  if (const auto* exit = std::get_if<crumb::tools::EarlyExit>(&parsed)) {
    return crumb::tools::ReportExit(*exit);
  }
  const absl::Status status = crumb::bench::Run(std::get<crumb::bench::Arguments>(parsed));
  if (!status.ok()) std::fprintf(stderr, "crumb-calls-bench: %s\n", status.ToString().c_str());
  return status.ok() ? 0 : crumb::tools::kExitFailure;
}
