// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <ostream>
#include <span>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace crumb::calibration {

// The CRC-32 of ZIP (polynomial 0x04C11DB7, reflected; APPNOTE.TXT 4.4.7).
uint32_t Crc32(std::span<const std::byte> bytes);

// A ZIP archive in memory whose entries are stored uncompressed, as torch.save writes them. Its
// bytes may be hostile: every offset and size is checked before it is used. The bytes must outlive
// the archive. Immutable, so thread-safe.
class ZipArchive {
 public:
  // Reads the central directory, and checks that every entry is inside the file, before the
  // directory, and disjoint from the others. `where` names the file in messages. kInvalidArgument
  // names the file and the entry: it is no archive or a truncated one, an entry is compressed or
  // encrypted, or a name occurs twice.
  static absl::StatusOr<ZipArchive> Parse(std::span<const std::byte> bytes, std::string where);

  std::vector<std::string> names() const;
  bool Has(const std::string& name) const { return entries_.contains(name); }
  // Returns an entry's bytes. kNotFound: no such entry; kDataLoss: its checksum differs.
  absl::StatusOr<std::span<const std::byte>> Read(const std::string& name) const;

 private:
  struct Entry {
    uint32_t crc = 0;
    uint64_t size = 0;
    uint64_t header_offset = 0;
    uint64_t offset = 0;  // offset of the first data byte
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

// Writes a ZIP archive of stored entries whose data begins at multiples of 64 bytes, as PyTorch
// requires. REQUIRES: the caller checks the stream for errors. Not thread-safe.
class ZipWriter {
 public:
  // `out` must outlive the writer, and be at its beginning.
  explicit ZipWriter(std::ostream& out) : out_(out) {}

  void Add(const std::string& name, std::span<const std::byte> bytes);
  void Add(const std::string& name, const std::string& text);
  // Writes the directory. REQUIRES: Add is not called afterwards.
  void Finish();

 private:
  void Put(const std::string& bytes);

  std::ostream& out_;
  uint64_t offset_ = 0;
  uint64_t entries_ = 0;
  std::string directory_;
};

}  // namespace crumb::calibration
