// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "common/unique_fd.h"
#include "storage/ssd/page_cipher.h"
#include "storage/store_options.h"

namespace crumb::storage {

// The SSD tier's folder: docs/formats/ssd-folder.md. Holds the lock that keeps a second process
// out. Immutable after Open.
class SsdFolder {
 public:
  // Creates the folder or checks that it is one of ours. kFailedPrecondition: read-only, in use by
  // another process, of a newer version, or with files of another program, which it leaves alone.
  // Or the folder's pages are encrypted with another key, or not as `key_check` says, which is
  // empty where pages are not to be encrypted.
  static absl::StatusOr<std::unique_ptr<SsdFolder>> Open(
      const SsdOptions& options, const std::optional<PageCipher::KeyCheck>& key_check);

  std::string index_path() const { return path_ + "/index"; }
  std::string extents_path() const { return path_ + "/extents"; }
  uint64_t extent_bytes() const { return extent_bytes_; }
  // Offsets, lengths and addresses of direct transfers are multiples of this.
  uint32_t alignment() const { return alignment_; }
  // False: reads and writes go through the page cache.
  bool direct_io() const { return direct_io_; }

  // Moves a damaged index out of the way, in place of an earlier one; deletes it when it is larger
  // than `keep_bytes_max`.
  absl::Status SetIndexAside(uint64_t keep_bytes_max) const;

  // Bytes that the folder takes on disk besides the extents.
  uint64_t BytesBesidesExtents() const;

 private:
  explicit SsdFolder(std::string path) : path_(std::move(path)) {}

  absl::Status Lock();
  absl::Status CheckEntries() const;
  absl::Status ReadFormat(const std::optional<PageCipher::KeyCheck>& key_check, bool* found);
  absl::Status WriteFormat(const std::optional<PageCipher::KeyCheck>& key_check) const;
  absl::Status ProbeDirectIo();

  const std::string path_;
  UniqueFd lock_;
  uint64_t extent_bytes_ = 0;
  uint32_t alignment_ = 0;
  bool direct_io_ = true;
};

// Makes `path`'s directory entries durable.
absl::Status SyncFolder(const std::string& path);

}  // namespace crumb::storage
