// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "common/atomic_file.h"

#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <filesystem>
#include <fstream>

#include "common/errno_status.h"

namespace crumb {
namespace {

absl::Status Write(const std::string& path, const std::function<void(std::ostream&)>& write) {
  errno = 0;
  std::ofstream out(path, std::ios::binary | std::ios::trunc);
  if (out.good()) write(out);
  out.close();
  if (out.good()) return absl::OkStatus();
  return ErrnoStatus(errno == 0 ? EIO : errno, "writing " + path);
}

std::string TemporaryOf(const std::string& path) {
  return path + ".tmp." + std::to_string(::getpid());
}

}  // namespace

absl::Status CheckWritable(const std::string& path) {
  std::error_code error;
  if (std::filesystem::is_directory(path, error)) return ErrnoStatus(EISDIR, "writing " + path);
  const std::string temporary = TemporaryOf(path);
  const absl::Status status = Write(temporary, [](std::ostream&) {});
  ::unlink(temporary.c_str());
  return status;
}

absl::Status WriteAtomically(const std::string& path,
                             const std::function<void(std::ostream&)>& write) {
  const std::string temporary = TemporaryOf(path);
  absl::Status status = Write(temporary, write);
  if (status.ok() && std::rename(temporary.c_str(), path.c_str()) != 0) {
    status = ErrnoStatus(errno, "renaming " + temporary + " to " + path);
  }
  if (!status.ok()) ::unlink(temporary.c_str());
  return status;
}

}  // namespace crumb
