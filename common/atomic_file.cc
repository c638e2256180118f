// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "common/atomic_file.h"

#include <unistd.h>

#include <cerrno>
#include <cstdio>
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

}  // namespace

absl::Status WriteAtomically(const std::string& path,
                             const std::function<void(std::ostream&)>& write) {
  const std::string temporary = path + ".tmp." + std::to_string(::getpid());
  absl::Status status = Write(temporary, write);
  if (status.ok() && std::rename(temporary.c_str(), path.c_str()) != 0) {
    status = ErrnoStatus(errno, "renaming " + temporary + " to " + path);
  }
  if (!status.ok()) ::unlink(temporary.c_str());
  return status;
}

}  // namespace crumb
