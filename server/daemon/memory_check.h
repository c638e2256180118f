// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "storage/store_options.h"

namespace crumb::server {

// Memory that the machine and this process's control group have.
struct MemoryFacts {
  std::optional<uint64_t> total_bytes;      // MemTotal
  std::optional<uint64_t> available_bytes;  // MemAvailable
  std::optional<uint64_t> limit_bytes;      // the lowest limit on the way up; none: unlimited
  std::string limit_file;                   // the file that has the limit
  // Room below the fullest limit on the way up, file cache counted as free; none: unlimited.
  std::optional<uint64_t> limit_room_bytes;
  uint64_t huge_pages_free = 0;          // number of free pages of 2 MiB
  std::optional<uint64_t> locked_bytes;  // RLIMIT_MEMLOCK; none: unlimited
};

// Reads /proc and the control groups of version 1 and 2 below `root`, "" for the real ones. A value
// that cannot be read counts as unlimited.
MemoryFacts ReadMemoryFacts(const std::string& root);

// Returns the bytes that could be taken now, in normal pages: the lower of the machine's available
// memory and the room below the control groups' limits. UINT64_MAX: nothing is known.
uint64_t FreeMemory(const MemoryFacts& facts);

// Returns the bytes that the host tier may take now, in normal pages: all but a reserve for the
// rest of crumbd. UINT64_MAX: nothing is known.
uint64_t MemoryRoom(const MemoryFacts& facts);

// Returns, line by line, the memory that the host tier needs and the memory that the machine has.
// kResourceExhausted, naming both: the need can never be met, and allocating it would make the
// kernel kill this process without a message. Memory that other processes use now is no reason to
// fail: it is allocated when it becomes free.
absl::StatusOr<std::vector<std::string>> CheckMemory(const storage::HostOptions& options,
                                                     const MemoryFacts& facts);

}  // namespace crumb::server
