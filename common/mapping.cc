// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "common/mapping.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <utility>

#include "common/errno_status.h"

namespace crumb {

Mapping::Mapping(Mapping&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}

Mapping& Mapping::operator=(Mapping&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  return *this;
}

Mapping::~Mapping() {
  if (data_ != nullptr) ::munmap(data_, size_);
}

absl::StatusOr<Mapping> Mapping::Of(int fd, size_t size, Access access) {
  const int protection = access == Access::kReadOnly ? PROT_READ : PROT_READ | PROT_WRITE;
  void* data = ::mmap(nullptr, size, protection, MAP_SHARED, fd, 0);
  if (data == MAP_FAILED) {
    return ErrnoStatus(errno, "mmap of " + std::to_string(size) + " shared bytes");
  }
  Mapping mapping;
  mapping.data_ = data;
  mapping.size_ = size;
  return mapping;
}

absl::StatusOr<UniqueFd> CreateMemfd(const std::string& name, size_t size) {
  UniqueFd fd(::memfd_create(name.c_str(), MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!fd.valid()) return ErrnoStatus(errno, "memfd_create " + name);
  // A memory file begins with mode 0777: any user who sees a descriptor in /proc could open it.
  if (::fchmod(fd.get(), 0600) != 0) return ErrnoStatus(errno, "fchmod of memory file " + name);
  if (::ftruncate(fd.get(), static_cast<off_t>(size)) != 0) {
    return ErrnoStatus(errno, "resizing memory file " + name + " to " + std::to_string(size));
  }
  return fd;
}

}  // namespace crumb
