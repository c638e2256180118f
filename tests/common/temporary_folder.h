// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <string>
#include <system_error>

namespace crumb {

// An empty folder of its own with a short path, gone with everything in it on destruction. On disk,
// or in memory, where there is such a place: syncs cost nothing there.
class TemporaryFolder {
 public:
  enum class Place { kDisk, kMemory };

  explicit TemporaryFolder(Place place = Place::kDisk) {
    const std::filesystem::path memory = "/dev/shm";
    const bool in_memory = place == Place::kMemory && ::access(memory.c_str(), W_OK) == 0;
    path_ = (in_memory ? memory : std::filesystem::temp_directory_path()) / "crumb-test-XXXXXX";
    if (::mkdtemp(path_.data()) == nullptr) std::abort();
  }
  ~TemporaryFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;

  const std::string& path() const { return path_; }
  // The path of `name` in it.
  std::string File(const std::string& name) const { return path_ + "/" + name; }

 private:
  std::string path_;
};

}  // namespace crumb
