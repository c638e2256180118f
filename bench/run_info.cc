// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "bench/run_info.h"

#include <sys/sysinfo.h>
#include <sys/utsname.h>

#include <ctime>
#include <fstream>
#include <thread>

#include "commit.h"
#include "fmt/chrono.h"
#include "fmt/format.h"

namespace crumb::bench {
namespace {

std::string CpuModel() {
  std::ifstream in("/proc/cpuinfo");
  for (std::string line; std::getline(in, line);) {
    const size_t colon = line.find(": ");
    if (line.rfind("model name", 0) == 0 && colon != std::string::npos) {
      return line.substr(colon + 2);
    }
  }
  return "unknown";
}

nlohmann::json Machine() {
  utsname names{};
  ::uname(&names);
  struct sysinfo memory {};
  ::sysinfo(&memory);
  return {{"cpu", CpuModel()},
          {"cores", std::thread::hardware_concurrency()},
          {"memory_bytes", static_cast<uint64_t>(memory.totalram) * memory.mem_unit},
          {"kernel", std::string(names.sysname) + " " + names.release}};
}

}  // namespace

nlohmann::json RunInfo(int argc, const char* const* argv) {
  std::string command = "crumb-bench";  // not the path, which is this machine's own affair
  for (int i = 1; i < argc; ++i) command += std::string(" ") + argv[i];
  return {{"machine", Machine()},
          {"commit", kCommit},
          {"command", command},
          {"time", fmt::format("{:%Y-%m-%dT%H:%M:%SZ}", fmt::gmtime(std::time(nullptr)))}};
}

}  // namespace crumb::bench
