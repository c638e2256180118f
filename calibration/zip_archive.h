// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace crumb::calibration {

// A ZIP archive in memory whose entries are stored uncompressed, as torch.save writes them. Borrows
// its bytes. Immutable, so thread-safe.
class ZipArchive {
 public:
  // Reads the central directory and checks that every entry lies inside the file, before it, and
  // apart from the others. `where` names the file in messages. kInvalidArgument names file and
  // entry: no archive, truncated, compressed or encrypted entries, a name twice.
  static absl::StatusOr<ZipArchive> Parse(std::span<const std::byte> bytes, std::string where);

  std::vector<std::string> names() const;
  bool Has(const std::string& name) const { return entries_.contains(name); }
  // An entry's bytes. kNotFound: no such entry; kDataLoss: its checksum differs.
  absl::StatusOr<std::span<const std::byte>> Read(const std::string& name) const;

 private:
  struct Entry {
    uint32_t crc = 0;
    uint64_t size = 0;
    uint64_t header_offset = 0;
    uint64_t offset = 0;  // of the first byte
  };
  struct Directory {
    uint64_t entries = 0;
    uint64_t size = 0;
    uint64_t offset = 0;
  };

  ZipArchive(std::span<const std::byte> bytes, std::string where)
      : bytes_(bytes), where_(std::move(where)) {}
  absl::Status Damaged(const std::string& what) const;
  absl::StatusOr<Directory> FindDirectory() const;
  absl::Status ReadDirectory(const Directory& directory);
  absl::Status LocateData(const std::string& name, uint64_t end, Entry& entry) const;
  absl::Status CheckApart() const;

  std::span<const std::byte> bytes_;
  std::string where_;
  std::map<std::string, Entry> entries_;
};

}  // namespace crumb::calibration
