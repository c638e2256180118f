// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
// crumb-calls-bench [--json] [--crumbd PROGRAM | --socket-dir DIR] [--clients N,N...] [--pages N]
//                   [--beside-pages N] [--seconds N]
//
// Times Acquires of many clients at once (bench/calls_workload.h). Starts a crumbd of its own, the
// one beside this program, unless it is told which.
#include <chrono>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <memory>
#include <sstream>
#include <string>

#include "bench/calls_workload.h"
#include "bench/servers_under_test.h"
#include "common/status_macros.h"

namespace crumb::bench {
namespace {

struct Arguments {
  bool json = false;
  std::string crumbd;
  CallsWorkload workload;
};

std::vector<int> NumbersOf(const std::string& list) {
  std::vector<int> numbers;
  std::istringstream in(list);
  for (std::string one; std::getline(in, one, ',');) numbers.push_back(std::atoi(one.c_str()));
  return numbers;
}

bool Parse(int argc, char** argv, Arguments* arguments) {
  std::error_code ignored;
  const auto self = std::filesystem::read_symlink("/proc/self/exe", ignored);
  arguments->crumbd = (self.parent_path() / "crumbd").string();
  CallsWorkload& workload = arguments->workload;
  for (int i = 1; i < argc; ++i) {
    const std::string flag = argv[i];
    if (flag == "--json") {
      arguments->json = true;
      continue;
    }
    if (i + 1 == argc) return false;
    const char* const value = argv[++i];
    if (flag == "--crumbd") {
      arguments->crumbd = value;
    } else if (flag == "--socket-dir") {
      workload.socket_dir = value;
    } else if (flag == "--clients") {
      workload.clients = NumbersOf(value);
    } else if (flag == "--pages") {
      workload.pages = std::atoi(value);
    } else if (flag == "--beside-pages") {
      workload.beside_pages = std::atoi(value);
    } else if (flag == "--seconds") {
      workload.duration = std::chrono::seconds(std::atoi(value));
    } else {
      return false;
    }
  }
  for (const int clients : workload.clients) {
    if (clients < 1 || clients > 1024) return false;
  }
  return workload.pages >= 1 && workload.pages <= 16'384 && workload.beside_pages >= 0 &&
         workload.beside_pages <= 16'384;
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
  crumb::bench::Arguments arguments;
  if (!crumb::bench::Parse(argc, argv, &arguments)) {
    std::fputs(
        "usage: crumb-calls-bench [--json] [--crumbd PROGRAM | --socket-dir DIR] "
        "[--clients N,N...] [--pages N] [--beside-pages N] [--seconds N]\n",
        stderr);
    return 2;
  }
  const absl::Status status = crumb::bench::Run(arguments);
  if (!status.ok()) std::fprintf(stderr, "crumb-calls-bench: %s\n", status.ToString().c_str());
  return status.ok() ? 0 : 1;
}
