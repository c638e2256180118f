// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "storage/ssd/extent_files.h"

#include <fcntl.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>

#include "common/errno_status.h"
#include "common/hex.h"
#include "common/status_macros.h"
#include "fmt/format.h"
#include "storage/slot_allocator.h"

namespace crumb::storage {
namespace {

namespace fs = std::filesystem;

constexpr char kSuffix[] = ".extent";

// Memory for a transfer whose caller's is not aligned.
struct FreeBuffer {
  void operator()(std::byte* bytes) const { std::free(bytes); }
};
using Buffer = std::unique_ptr<std::byte, FreeBuffer>;

Buffer AlignedBuffer(size_t alignment, size_t bytes) {
  return Buffer(static_cast<std::byte*>(std::aligned_alloc(alignment, bytes)));
}

absl::Status ReadAll(int fd, std::byte* to, uint64_t bytes, uint64_t offset,
                     const std::string& what) {
  while (bytes > 0) {
    const ssize_t got = ::pread(fd, to, bytes, static_cast<off_t>(offset));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return ErrnoStatus(errno, "reading " + what);
    if (got == 0) return absl::DataLossError(what + " ends before a page that it holds");
    to += got;
    offset += static_cast<uint64_t>(got);
    bytes -= static_cast<uint64_t>(got);
  }
  return absl::OkStatus();
}

absl::Status WriteAll(int fd, const std::byte* from, uint64_t bytes, uint64_t offset,
                      const std::string& what) {
  while (bytes > 0) {
    const ssize_t put = ::pwrite(fd, from, bytes, static_cast<off_t>(offset));
    if (put < 0 && errno == EINTR) continue;
    if (put < 0) return ErrnoStatus(errno, "writing " + what);
    from += put;
    offset += static_cast<uint64_t>(put);
    bytes -= static_cast<uint64_t>(put);
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::unique_ptr<ExtentFiles>> ExtentFiles::Open(const SsdFolder& folder) {
  std::unique_ptr<ExtentFiles> files(new ExtentFiles(folder));
  std::error_code error;
  for (const fs::directory_entry& entry : fs::directory_iterator(folder.extents_path(), error)) {
    const std::string name = entry.path().filename();
    unsigned number = 0;
    if (std::sscanf(name.c_str(), "%8x", &number) != 1 || entry.path() != files->PathOf(number)) {
      return absl::FailedPreconditionError(entry.path().string() + " is no extent of Crumb's");
    }
    CRUMB_ASSIGN_OR_RETURN(UniqueFd fd, files->OpenFile(number, 0));
    struct stat status;
    if (::fstat(fd.get(), &status) != 0) return ErrnoStatus(errno, "reading the size of " + name);
    const uint64_t intact = std::min(static_cast<uint64_t>(status.st_size), folder.extent_bytes());
    const bool whole = ::fallocate(fd.get(), 0, 0, static_cast<off_t>(folder.extent_bytes())) == 0;
    files->found_.push_back({number, intact, whole ? folder.extent_bytes() : intact});
    MutexLock lock(&files->mutex_);
    files->files_[number] = std::make_shared<const UniqueFd>(std::move(fd));
  }
  if (error) return ErrnoStatus(error.value(), "listing " + folder.extents_path());
  std::sort(files->found_.begin(), files->found_.end(),
            [](const Extent& a, const Extent& b) { return a.number < b.number; });
  return files;
}

const ExtentFiles::Extent* ExtentFiles::FindFound(uint32_t number) const {
  const auto found = std::lower_bound(
      found_.begin(), found_.end(), number,
      [](const Extent& extent, uint32_t wanted) { return extent.number < wanted; });
  return found != found_.end() && found->number == number ? &*found : nullptr;
}

std::string ExtentFiles::PathOf(uint32_t number) const {
  return fmt::format("{}/{:08x}{}", folder_.extents_path(), number, kSuffix);
}

absl::StatusOr<UniqueFd> ExtentFiles::OpenFile(uint32_t number, int flags) const {
  const std::string path = PathOf(number);
  const int direct = folder_.direct_io() ? O_DIRECT : 0;
  UniqueFd fd(::open(path.c_str(), O_RDWR | O_CLOEXEC | direct | flags, 0640));
  if (!fd.valid()) return ErrnoStatus(errno, "opening " + path);
  return fd;
}

absl::StatusOr<uint32_t> ExtentFiles::Create() {
  uint32_t number = 0;
  {
    MutexLock lock(&mutex_);
    while (files_.contains(number) || being_created_.contains(number)) ++number;
    being_created_.insert(number);
  }
  absl::StatusOr<UniqueFd> fd = OpenFile(number, O_CREAT);
  absl::Status status = fd.status();
  if (status.ok() &&
      ::fallocate(fd->get(), 0, 0, static_cast<off_t>(folder_.extent_bytes())) != 0) {
    status = errno == EFBIG ? absl::ResourceExhaustedError("file size limit for extents")
                            : ErrnoStatus(errno, "allocating " + PathOf(number));
  }
  if (status.ok() && ::fsync(fd->get()) != 0) status = ErrnoStatus(errno, "syncing an extent");
  if (status.ok()) status = SyncFolder(folder_.extents_path());
  if (!status.ok()) ::unlink(PathOf(number).c_str());
  MutexLock lock(&mutex_);
  being_created_.erase(number);
  if (!status.ok()) return status;
  files_[number] = std::make_shared<const UniqueFd>(std::move(*fd));
  return number;
}

absl::Status ExtentFiles::Remove(uint32_t number) {
  SharedFd last;  // closed outside the lock
  {
    MutexLock lock(&mutex_);
    const auto found = files_.find(number);
    if (found == files_.end()) return absl::OkStatus();
    last = std::move(found->second);
    files_.erase(found);
  }
  if (::unlink(PathOf(number).c_str()) != 0) return ErrnoStatus(errno, "removing an extent");
  return absl::OkStatus();
}

absl::StatusOr<ExtentFiles::SharedFd> ExtentFiles::FdOf(uint32_t number) const {
  MutexLock lock(&mutex_);
  const auto found = files_.find(number);
  if (found == files_.end()) return absl::NotFoundError("the extent is gone");
  return found->second;
}

bool ExtentFiles::IsAligned(const std::byte* address, size_t size) const {
  return reinterpret_cast<uintptr_t>(address) % folder_.alignment() == 0 &&
         size % folder_.alignment() == 0;
}

absl::Status ExtentFiles::Write(uint32_t number, uint64_t offset, std::span<const std::byte> room,
                                uint64_t bytes) {
  CRUMB_ASSIGN_OR_RETURN(const SharedFd fd, FdOf(number));
  const uint64_t whole = RoundUp(bytes, folder_.alignment());
  if (room.size() >= whole && IsAligned(room.data(), whole)) {
    return WriteAll(fd->get(), room.data(), whole, offset, PathOf(number));
  }
  const Buffer buffer = AlignedBuffer(folder_.alignment(), whole);
  if (buffer == nullptr) return absl::ResourceExhaustedError("no memory for a transfer");
  std::memcpy(buffer.get(), room.data(), bytes);
  std::memset(buffer.get() + bytes, 0, whole - bytes);
  return WriteAll(fd->get(), buffer.get(), whole, offset, PathOf(number));
}

absl::Status ExtentFiles::Read(uint32_t number, uint64_t offset, std::span<std::byte> room,
                               uint64_t bytes) {
  CRUMB_ASSIGN_OR_RETURN(const SharedFd fd, FdOf(number));
  const uint64_t whole = RoundUp(bytes, folder_.alignment());
  if (room.size() >= whole && IsAligned(room.data(), whole)) {
    return ReadAll(fd->get(), room.data(), whole, offset, PathOf(number));
  }
  const Buffer buffer = AlignedBuffer(folder_.alignment(), whole);
  if (buffer == nullptr) return absl::ResourceExhaustedError("no memory for a transfer");
  CRUMB_RETURN_IF_ERROR(ReadAll(fd->get(), buffer.get(), whole, offset, PathOf(number)));
  std::memcpy(room.data(), buffer.get(), bytes);
  return absl::OkStatus();
}

absl::Status ExtentFiles::Sync(uint32_t number) {
  CRUMB_ASSIGN_OR_RETURN(const SharedFd fd, FdOf(number));
  if (::fdatasync(fd->get()) != 0) return ErrnoStatus(errno, "syncing " + PathOf(number));
  return absl::OkStatus();
}

uint64_t ExtentFiles::bytes() const {
  MutexLock lock(&mutex_);
  return (files_.size() + being_created_.size()) * folder_.extent_bytes();
}

}  // namespace crumb::storage
