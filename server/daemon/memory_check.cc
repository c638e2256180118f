// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "server/daemon/memory_check.h"

#include <sys/resource.h>

#include <algorithm>
#include <charconv>
#include <fstream>
#include <sstream>

#include "common/config.h"
#include "fmt/format.h"

namespace crumb::server {
namespace {

constexpr uint64_t kHugePageBytes = uint64_t{2} << 20;
// Memory that crumbd needs beside its slabs to start: RocksDB, gRPC, page tables.
constexpr uint64_t kBesideBytes = uint64_t{64} << 20;

constexpr uint64_t kUnlimited = uint64_t{1} << 60;

std::string Show(uint64_t bytes) {
  constexpr uint64_t kMiB = uint64_t{1} << 20;
  return bytes >= kMiB ? FormatByteSize(ByteSize{bytes / kMiB * kMiB}) : FormatByteSize({bytes});
}

// The number at the start of `text`.
std::optional<uint64_t> Number(const std::string& text) {
  uint64_t value = 0;
  const size_t begin = text.find_first_not_of(" \t");
  if (begin == std::string::npos) return std::nullopt;
  const auto result = std::from_chars(text.data() + begin, text.data() + text.size(), value);
  if (result.ec != std::errc()) return std::nullopt;
  return value;
}

std::optional<uint64_t> NumberIn(const std::string& path) {
  std::ifstream file(path);
  std::string line;
  if (!std::getline(file, line)) return std::nullopt;
  return Number(line);  // none for "max"
}

void ReadMeminfo(const std::string& path, MemoryFacts& facts) {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    const size_t colon = line.find(':');
    if (colon == std::string::npos) continue;
    const std::string name = line.substr(0, colon);
    const std::optional<uint64_t> value = Number(line.substr(colon + 1));
    if (!value.has_value()) continue;
    if (name == "MemTotal") facts.total_bytes = *value * 1024;
    if (name == "MemAvailable") facts.available_bytes = *value * 1024;
    if (name == "HugePages_Free") facts.huge_pages_free = *value;
  }
}

// File names of one version, and the name of the file cache in its statistics.
struct ControlFiles {
  const char* limit;
  const char* usage;
  const char* cache_prefix;
};
constexpr ControlFiles kVersionOne = {"memory.limit_in_bytes", "memory.usage_in_bytes", "total_"};
constexpr ControlFiles kVersionTwo = {"memory.max", "memory.current", ""};

// Bytes of file cache, which the kernel gives up when memory is short. Slabs are not among them.
uint64_t CacheBytes(const std::string& folder, const ControlFiles& files) {
  uint64_t bytes = 0;
  std::ifstream file(folder + "/memory.stat");
  for (std::string line; std::getline(file, line);) {
    const size_t space = line.find(' ');
    if (space == std::string::npos) continue;
    const std::string name = line.substr(0, space);
    for (const char* kind : {"inactive_file", "active_file"}) {
      if (name == files.cache_prefix + std::string(kind)) {
        bytes += Number(line.substr(space)).value_or(0);
      }
    }
  }
  return bytes;
}

void NoteRoom(const std::string& folder, const ControlFiles& files, uint64_t limit,
              MemoryFacts& facts) {
  const std::optional<uint64_t> usage = NumberIn(folder + "/" + files.usage);
  if (!usage.has_value()) return;
  const uint64_t used = *usage - std::min(*usage, CacheBytes(folder, files));
  const uint64_t room = limit - std::min(limit, used);
  facts.limit_room_bytes = std::min(facts.limit_room_bytes.value_or(room), room);
}

// Takes the lowest limit from `group` up to the hierarchy's root.
void ReadLimits(const std::string& hierarchy, std::string group, const ControlFiles& files,
                MemoryFacts& facts) {
  constexpr int kDepthMax = 64;
  for (int depth = 0; depth < kDepthMax; ++depth) {
    const std::string folder = hierarchy + (group == "/" ? "" : group);
    const std::string path = folder + "/" + files.limit;
    const std::optional<uint64_t> limit = NumberIn(path);
    if (limit.has_value() && *limit < kUnlimited) NoteRoom(folder, files, *limit, facts);
    // Version 1 writes unlimited as the largest multiple of a page.
    if (limit.has_value() && *limit < kUnlimited &&
        (!facts.limit_bytes.has_value() || *limit < *facts.limit_bytes)) {
      facts.limit_bytes = limit;
      facts.limit_file = path;
    }
    const size_t slash = group.rfind('/');
    if (slash == std::string::npos || group == "/") return;
    group = slash == 0 ? "/" : group.substr(0, slash);
  }
}

// Lines of /proc/self/cgroup: "0::/path" in version 2, "4:cpu,memory:/path" in version 1.
void ReadControlGroups(const std::string& root, MemoryFacts& facts) {
  const std::string mount = root + "/sys/fs/cgroup";
  std::ifstream file(root + "/proc/self/cgroup");
  for (std::string line; std::getline(file, line);) {
    const size_t first = line.find(':');
    const size_t second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const std::string controllers = "," + line.substr(first + 1, second - first - 1) + ",";
    const std::string group = line.substr(second + 1);
    if (controllers == ",,") ReadLimits(mount, group, kVersionTwo, facts);
    if (controllers.find(",memory,") != std::string::npos) {
      ReadLimits(mount + "/memory", group, kVersionOne, facts);
    }
  }
}

absl::Status CheckFits(uint64_t needed, const MemoryFacts& facts) {
  if (facts.limit_bytes.has_value() && needed + kBesideBytes > *facts.limit_bytes) {
    return absl::ResourceExhaustedError(fmt::format(
        "store.host.bytes_max is {} and {} more are needed, but {} allows {}: raise that limit or "
        "lower store.host.bytes_max",
        Show(needed), Show(kBesideBytes), facts.limit_file, Show(*facts.limit_bytes)));
  }
  if (facts.total_bytes.has_value() && needed + kBesideBytes > *facts.total_bytes) {
    return absl::ResourceExhaustedError(fmt::format(
        "store.host.bytes_max is {} and {} more are needed, but the machine has {} of memory: "
        "lower store.host.bytes_max",
        Show(needed), Show(kBesideBytes), Show(*facts.total_bytes)));
  }
  return absl::OkStatus();
}

std::string OrUnlimited(const std::optional<uint64_t>& bytes) {
  return bytes.has_value() ? Show(*bytes) : "unlimited";
}

}  // namespace

MemoryFacts ReadMemoryFacts(const std::string& root) {
  MemoryFacts facts;
  ReadMeminfo(root + "/proc/meminfo", facts);
  ReadControlGroups(root, facts);
  rlimit limit{};
  if (::getrlimit(RLIMIT_MEMLOCK, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY) {
    facts.locked_bytes = limit.rlim_cur;
  }
  return facts;
}

uint64_t FreeMemory(const MemoryFacts& facts) {
  return std::min(facts.available_bytes.value_or(UINT64_MAX),
                  facts.limit_room_bytes.value_or(UINT64_MAX));
}

uint64_t MemoryRoom(const MemoryFacts& facts) {
  const uint64_t room = FreeMemory(facts);
  return room == UINT64_MAX ? room : room - std::min(room, kBesideBytes);
}

absl::StatusOr<std::vector<std::string>> CheckMemory(const storage::HostOptions& options,
                                                     const MemoryFacts& facts) {
  const uint64_t bytes = options.bytes_max.value;
  const uint64_t huge_needed = (bytes + kHugePageBytes - 1) / kHugePageBytes;
  const bool huge = options.huge_pages && facts.huge_pages_free >= huge_needed;
  // Huge pages are reserved already and counted by a controller of their own.
  if (!huge) {
    if (const absl::Status fits = CheckFits(bytes, facts); !fits.ok()) return fits;
  }
  std::vector<std::string> lines = {
      fmt::format("memory: the host tier takes {} before crumbd is ready; available {}, limit {}",
                  Show(bytes), OrUnlimited(facts.available_bytes), OrUnlimited(facts.limit_bytes))};
  if (const uint64_t room = MemoryRoom(facts); !huge && room < bytes) {
    lines.push_back(
        fmt::format("memory: {} of it can be had now, the rest when it is given back, for example "
                    "by workers that still map the memory of a crumbd before",
                    Show(room)));
  }
  if (options.huge_pages) {
    lines.push_back(fmt::format("huge pages: {} of 2 MiB are needed, {} are free{}", huge_needed,
                                facts.huge_pages_free,
                                huge ? ""
                                     : "; reserve them (sysctl vm.nr_hugepages) or what is "
                                       "missing is taken in normal pages"));
  }
  lines.push_back(
      fmt::format("locked memory: crumbd locks none itself; the limit is {}, RDMA transports need "
                  "it unlimited",
                  OrUnlimited(facts.locked_bytes)));
  return lines;
}

}  // namespace crumb::server
