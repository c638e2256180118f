// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>

namespace crumb::client {

// What a process has of the system. Anonymous mappings are counted by their bytes only: allocators
// keep those.
struct ProcessUse {
  size_t fds = 0;
  std::map<std::string, int> mappings;  // of memory files and devices, and how often
  uint64_t locked_kb = 0, pinned_kb = 0, mapped_kb = 0;
};
ProcessUse UseOfThisProcess();

}  // namespace crumb::client
