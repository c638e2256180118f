// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "common/mutex.h"
#include "common/unique_fd.h"
#include "storage/ssd/ssd_folder.h"

namespace crumb::storage {

// The files that hold page bytes, all of one size and allocated in full. Reads and writes bypass
// the page cache where the folder can. Thread-safe; no lock is held over a transfer.
class ExtentFiles {
 public:
  // Opens the extents in the folder. kFailedPrecondition: the folder has a file that is no extent.
  static absl::StatusOr<std::unique_ptr<ExtentFiles>> Open(const SsdFolder& folder);

  struct Extent {
    uint32_t number = 0;
    uint64_t intact_bytes = 0;  // its size when it was opened, before a truncated file is extended
    uint64_t bytes = 0;         // its size now
  };
  // The extents that were there when the folder was opened, in the order of their numbers.
  const std::vector<Extent>& found() const { return found_; }
  // The one of this number; null: there was none. O(log extents).
  const Extent* FindFound(uint32_t number) const;

  // Adds an extent and returns its number. kResourceExhausted: the disk is full.
  absl::StatusOr<uint32_t> Create();
  absl::Status Remove(uint32_t number);

  // Writes `room`, or as much of it as `bytes` rounded up to the alignment, at `offset`, which is
  // aligned. Durable after Sync.
  absl::Status Write(uint32_t number, uint64_t offset, std::span<const std::byte> room,
                     uint64_t bytes);
  // Reads `bytes` into `room`. kDataLoss: the file ends before.
  absl::Status Read(uint32_t number, uint64_t offset, std::span<std::byte> room, uint64_t bytes);
  absl::Status Sync(uint32_t number);

  uint64_t bytes() const;

 private:
  using SharedFd = std::shared_ptr<const UniqueFd>;

  explicit ExtentFiles(const SsdFolder& folder) : folder_(folder) {}

  std::string PathOf(uint32_t number) const;
  absl::StatusOr<UniqueFd> OpenFile(uint32_t number, int flags) const;
  absl::StatusOr<SharedFd> FdOf(uint32_t number) const;
  bool IsAligned(const std::byte* address, size_t size) const;

  const SsdFolder& folder_;
  std::vector<Extent> found_;
  mutable Mutex mutex_;
  std::map<uint32_t, SharedFd> files_ ABSL_GUARDED_BY(mutex_);
  std::set<uint32_t> being_created_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace crumb::storage
