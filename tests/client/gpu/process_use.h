// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>

namespace crumb::client {

// The system resources that a process uses. Anonymous mappings count by their bytes only, because
// allocators keep them.
struct ProcessUse {
  size_t fds = 0;
  std::map<std::string, int> mappings;  // number of mappings of each memory file and device
  uint64_t locked_kb = 0, pinned_kb = 0, mapped_kb = 0;
};
ProcessUse UseOfThisProcess();

}  // namespace crumb::client
