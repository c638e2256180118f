// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "tests/client/gpu/process_use.h"

#include <filesystem>
#include <fstream>
#include <iterator>

namespace crumb::client {

ProcessUse UseOfThisProcess() {
  ProcessUse use;
  const std::filesystem::directory_iterator fds("/proc/self/fd"), end;
  use.fds = static_cast<size_t>(std::distance(fds, end));
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    const size_t file = line.find_first_of("/[");
    const bool counted = file != std::string::npos && (line.find("memfd") != std::string::npos ||
                                                       line.find("/dev/") != std::string::npos);
    if (counted) ++use.mappings[line.substr(file)];
  }
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.starts_with("VmLck:")) use.locked_kb = std::stoull(line.substr(6));
    if (line.starts_with("VmPin:")) use.pinned_kb = std::stoull(line.substr(6));
    if (line.starts_with("VmSize:")) use.mapped_kb = std::stoull(line.substr(7));
  }
  return use;
}

}  // namespace crumb::client
