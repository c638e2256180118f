// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "calibration/zip_archive.h"

#include <algorithm>
#include <utility>

#include "calibration/crc32.h"
#include "common/little_endian.h"
#include "common/status_macros.h"
#include "fmt/format.h"

// Names of fields and records: PKWARE APPNOTE.TXT 6.3.
namespace crumb::calibration {
namespace {

constexpr uint32_t kLocalHeader = 0x04034b50;
constexpr uint32_t kCentralHeader = 0x02014b50;
constexpr uint32_t kEnd = 0x06054b50;
constexpr uint32_t kEnd64 = 0x06064b50;
constexpr uint32_t kEnd64Locator = 0x07064b50;
constexpr uint64_t kLocalHeaderBytes = 30;
constexpr uint64_t kCentralHeaderBytes = 46;
constexpr uint64_t kEndBytes = 22;
constexpr uint64_t kEnd64Bytes = 56;
constexpr uint64_t kEnd64LocatorBytes = 20;
constexpr uint64_t kCommentMax = 0xffff;
constexpr uint64_t kEntriesMax = 1 << 18;
constexpr uint16_t kEncrypted = 1;
constexpr uint16_t kZip64Extra = 1;

// Little-endian integers at fixed places of a record that is known to be there.
uint16_t U16(std::span<const std::byte> bytes, uint64_t at) {
  return LoadLittle<uint16_t>(bytes.data() + at);
}
uint32_t U32(std::span<const std::byte> bytes, uint64_t at) {
  return LoadLittle<uint32_t>(bytes.data() + at);
}
uint64_t U64(std::span<const std::byte> bytes, uint64_t at) {
  return LoadLittle<uint64_t>(bytes.data() + at);
}

// Replaces those of `fields` that are all ones by the ZIP64 extra field's, in their order. False:
// the extra field is too short or malformed.
bool ApplyZip64(std::span<const std::byte> extra, std::initializer_list<uint64_t*> fields) {
  const bool needed =
      std::any_of(fields.begin(), fields.end(), [](auto* f) { return *f == 0xffffffffu; });
  if (!needed) return true;
  for (uint64_t at = 0; at + 4 <= extra.size();) {
    const uint64_t size = U16(extra, at + 2);
    if (at + 4 + size > extra.size()) return false;
    if (U16(extra, at) == kZip64Extra) {
      uint64_t used = 0;
      for (uint64_t* field : fields) {
        if (*field != 0xffffffffu) continue;
        if (used + 8 > size) return false;
        *field = U64(extra, at + 4 + used);
        used += 8;
      }
      return true;
    }
    at += 4 + size;
  }
  return false;
}

}  // namespace

absl::Status ZipArchive::Damaged(const std::string& what) const {
  return absl::InvalidArgumentError(where_ + ": " + what);
}

absl::StatusOr<ZipArchive> ZipArchive::Parse(std::span<const std::byte> bytes, std::string where) {
  ZipArchive archive(bytes, std::move(where));
  CRUMB_ASSIGN_OR_RETURN(const Directory directory, archive.FindDirectory());
  CRUMB_RETURN_IF_ERROR(archive.ReadDirectory(directory));
  CRUMB_RETURN_IF_ERROR(archive.CheckApart());
  return archive;
}

absl::StatusOr<ZipArchive::Directory> ZipArchive::FindDirectory() const {
  const uint64_t size = bytes_.size();
  const uint64_t furthest = std::min(size, kEndBytes + kCommentMax);
  for (uint64_t back = kEndBytes; back <= furthest; ++back) {
    const uint64_t at = size - back;
    if (U32(bytes_, at) != kEnd || U16(bytes_, at + 20) != back - kEndBytes) continue;
    Directory directory{.entries = U16(bytes_, at + 10),
                        .size = U32(bytes_, at + 12),
                        .offset = U32(bytes_, at + 16)};
    uint64_t end = at;
    if (at >= kEnd64LocatorBytes && U32(bytes_, at - kEnd64LocatorBytes) == kEnd64Locator) {
      end = U64(bytes_, at - kEnd64LocatorBytes + 8);
      if (end > at - kEnd64LocatorBytes || at - kEnd64LocatorBytes - end < kEnd64Bytes ||
          U32(bytes_, end) != kEnd64) {
        return Damaged("its ZIP64 end record is not where its locator says");
      }
      directory = {.entries = U64(bytes_, end + 32),
                   .size = U64(bytes_, end + 40),
                   .offset = U64(bytes_, end + 48)};
    }
    if (directory.size > end || directory.offset > end - directory.size) {
      return Damaged("its directory reaches beyond the file; it is damaged");
    }
    return directory;
  }
  return Damaged("no ZIP archive, or a truncated one: it has no end record");
}

absl::Status ZipArchive::ReadDirectory(const Directory& directory) {
  if (directory.entries > kEntriesMax) {
    return Damaged(fmt::format("{} entries, at most {} are read", directory.entries, kEntriesMax));
  }
  const auto records = bytes_.subspan(directory.offset, directory.size);
  uint64_t at = 0;
  for (uint64_t i = 0; i < directory.entries; ++i) {
    if (records.size() - at < kCentralHeaderBytes || U32(records, at) != kCentralHeader) {
      return Damaged(
          fmt::format("its directory ends after {} of {} entries", i, directory.entries));
    }
    const uint64_t name_size = U16(records, at + 28), extra_size = U16(records, at + 30);
    const uint64_t rest = name_size + extra_size + U16(records, at + 32);
    if (records.size() - at - kCentralHeaderBytes < rest) {
      return Damaged(fmt::format("its directory ends inside entry {}", i));
    }
    const auto name_bytes = records.subspan(at + kCentralHeaderBytes, name_size);
    const std::string name(reinterpret_cast<const char*>(name_bytes.data()), name_size);
    Entry entry{.crc = U32(records, at + 16),
                .size = U32(records, at + 24),
                .header_offset = U32(records, at + 42),
                .offset = 0};
    uint64_t compressed = U32(records, at + 20);
    const auto extra = records.subspan(at + kCentralHeaderBytes + name_size, extra_size);
    if (!ApplyZip64(extra, {&entry.size, &compressed, &entry.header_offset})) {
      return Damaged("entry " + name + ": its ZIP64 field is damaged");
    }
    if (U16(records, at + 10) != 0 || (U16(records, at + 8) & kEncrypted) != 0) {
      return Damaged("entry " + name + " is compressed or encrypted; torch.save stores entries");
    }
    if (compressed != entry.size) return Damaged("entry " + name + ": its two sizes differ");
    CRUMB_RETURN_IF_ERROR(LocateData(name, directory.offset, entry));
    if (!entries_.emplace(name, entry).second) return Damaged("entry " + name + " is there twice");
    at += kCentralHeaderBytes + rest;
  }
  return absl::OkStatus();
}

absl::Status ZipArchive::LocateData(const std::string& name, uint64_t end, Entry& entry) const {
  if (entry.header_offset > end || end - entry.header_offset < kLocalHeaderBytes ||
      U32(bytes_, entry.header_offset) != kLocalHeader) {
    return Damaged("entry " + name + ": its header is not where the directory says");
  }
  const uint64_t before =
      U16(bytes_, entry.header_offset + 26) + U16(bytes_, entry.header_offset + 28);
  entry.offset = entry.header_offset + kLocalHeaderBytes + before;
  if (entry.offset > end || end - entry.offset < entry.size) {
    return Damaged(fmt::format("entry {}: {} bytes at offset {} reach beyond the archive's {}",
                               name, entry.size, entry.offset, end));
  }
  return absl::OkStatus();
}

absl::Status ZipArchive::CheckApart() const {
  std::vector<std::pair<uint64_t, const std::string*>> order;
  for (const auto& [name, entry] : entries_) order.emplace_back(entry.header_offset, &name);
  std::sort(order.begin(), order.end());
  for (size_t i = 1; i < order.size(); ++i) {
    const Entry& before = entries_.at(*order[i - 1].second);
    if (order[i].first < before.offset + before.size) {
      return Damaged("entries " + *order[i - 1].second + " and " + *order[i].second + " overlap");
    }
  }
  return absl::OkStatus();
}

std::vector<std::string> ZipArchive::names() const {
  std::vector<std::string> names;
  for (const auto& [name, entry] : entries_) names.push_back(name);
  return names;
}

absl::StatusOr<std::span<const std::byte>> ZipArchive::Read(const std::string& name) const {
  const auto it = entries_.find(name);
  if (it == entries_.end()) return absl::NotFoundError(where_ + ": no entry " + name);
  const auto data = bytes_.subspan(it->second.offset, it->second.size);
  if (Crc32(data) != it->second.crc) {
    return absl::DataLossError(where_ + ": entry " + name +
                               ": its checksum differs; it is damaged");
  }
  return data;
}

}  // namespace crumb::calibration
