// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "tests/fault/memory_group.h"

#include <sys/stat.h>
#include <unistd.h>

#include <chrono>
#include <fstream>
#include <thread>
#include <vector>

namespace crumb::fault {
namespace {

constexpr auto kRemoveWait = std::chrono::seconds(20);

struct Place {
  std::string parent;
  std::string limit_file;
};

// Folders in which groups with a memory limit could be made: version 1 and 2, in this process's
// group or, in a namespace that does not show it, at the top.
std::vector<Place> Places() {
  std::vector<Place> places;
  std::ifstream file("/proc/self/cgroup");
  for (std::string line; std::getline(file, line);) {
    const size_t first = line.find(':');
    const size_t second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const std::string controllers = "," + line.substr(first + 1, second - first - 1) + ",";
    const std::string group = line.substr(second + 1);
    if (controllers.find(",memory,") != std::string::npos) {
      for (const std::string& below : {group, std::string()}) {
        places.push_back({"/sys/fs/cgroup/memory" + below, "memory.limit_in_bytes"});
      }
    }
    if (controllers == ",,") places.push_back({"/sys/fs/cgroup" + group, "memory.max"});
  }
  return places;
}

}  // namespace

MemoryGroup::MemoryGroup(uint64_t limit_bytes) {
  for (const Place& place : Places()) {
    const std::string folder = place.parent + "/crumb-test-" + std::to_string(::getpid());
    if (::mkdir(folder.c_str(), 0755) != 0) continue;
    std::ofstream limit(folder + "/" + place.limit_file);
    limit << limit_bytes << std::flush;
    if (limit) {
      folder_ = folder;
      return;
    }
    ::rmdir(folder.c_str());
  }
}

MemoryGroup::~MemoryGroup() {
  if (folder_.empty()) return;
  // The kernel takes its time with the last process.
  const auto deadline = std::chrono::steady_clock::now() + kRemoveWait;
  while (::rmdir(folder_.c_str()) != 0 && std::chrono::steady_clock::now() < deadline) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
}

}  // namespace crumb::fault
