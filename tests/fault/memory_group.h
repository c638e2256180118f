// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>

namespace crumb::fault {

// A control group with a memory limit, below the one of this process; removed with this object,
// whose processes have ended then.
class MemoryGroup {
 public:
  explicit MemoryGroup(uint64_t limit_bytes);
  ~MemoryGroup();
  MemoryGroup(const MemoryGroup&) = delete;
  MemoryGroup& operator=(const MemoryGroup&) = delete;

  // The group's folder; empty where this process may make none.
  const std::string& folder() const { return folder_; }

 private:
  std::string folder_;
};

}  // namespace crumb::fault
