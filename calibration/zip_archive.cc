// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "calibration/zip_archive.h"

#include <algorithm>
#include <array>
#include <concepts>
#include <utility>

#include "common/little_endian.h"
#include "common/status_macros.h"
#include "fmt/format.h"

// Fields and records have the names of PKWARE's APPNOTE.TXT 6.3.
namespace crumb::calibration {
namespace {

// Entry [k][b] is the effect on the CRC of byte b, k bytes before the end of a group of eight.
using Tables = std::array<std::array<uint32_t, 256>, 8>;

constexpr Tables MakeTables() {
  Tables tables{};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t value = byte;
    for (int bit = 0; bit < 8; ++bit) value = value >> 1 ^ (value & 1 ? 0xedb88320u : 0u);
    tables[0][byte] = value;
  }
  for (size_t k = 1; k < tables.size(); ++k) {
    for (uint32_t byte = 0; byte < 256; ++byte) {
      const uint32_t before = tables[k - 1][byte];
      tables[k][byte] = before >> 8 ^ tables[0][before & 0xff];
    }
  }
  return tables;
}

constexpr Tables kTables = MakeTables();

}  // namespace

uint32_t Crc32(std::span<const std::byte> bytes) {
  const auto at = [&bytes](size_t i) { return static_cast<uint32_t>(bytes[i]); };
  uint32_t crc = 0xffffffffu;
  size_t i = 0;
  for (; i + 8 <= bytes.size(); i += 8) {
    crc ^= at(i) | at(i + 1) << 8 | at(i + 2) << 16 | at(i + 3) << 24;
    crc = kTables[7][crc & 0xff] ^ kTables[6][crc >> 8 & 0xff] ^ kTables[5][crc >> 16 & 0xff] ^
          kTables[4][crc >> 24] ^ kTables[3][at(i + 4)] ^ kTables[2][at(i + 5)] ^
          kTables[1][at(i + 6)] ^ kTables[0][at(i + 7)];
  }
  for (; i < bytes.size(); ++i) crc = crc >> 8 ^ kTables[0][(crc ^ at(i)) & 0xff];
  return ~crc;
}

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
constexpr uint64_t kCommentMax = 0xffff;  // bytes of the archive's comment, by the format
// Entries of an archive that is read. It bounds the memory of the index; a checkpoint of a thousand
// layers has fewer than ten thousand.
constexpr uint64_t kEntriesMax = 1 << 18;
constexpr uint16_t kEncrypted = 1;
constexpr uint16_t kZip64Extra = 1;

// Little-endian integers at fixed offsets of a record whose size the caller has checked.
uint16_t U16(std::span<const std::byte> bytes, uint64_t at) {
  return LoadLittle<uint16_t>(bytes.data() + at);
}
uint32_t U32(std::span<const std::byte> bytes, uint64_t at) {
  return LoadLittle<uint32_t>(bytes.data() + at);
}
uint64_t U64(std::span<const std::byte> bytes, uint64_t at) {
  return LoadLittle<uint64_t>(bytes.data() + at);
}

// Replaces those of `fields` that are all ones by the values of the ZIP64 extra field, in their
// order. Returns false if the extra field is too short or malformed.
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
        return Damaged(
            "the ZIP64 end record is not at the offset of its locator; the file is damaged");
      }
      directory = {.entries = U64(bytes_, end + 32),
                   .size = U64(bytes_, end + 40),
                   .offset = U64(bytes_, end + 48)};
    }
    if (directory.size > end || directory.offset > end - directory.size) {
      return Damaged("the directory reaches beyond the file; the file is damaged");
    }
    return directory;
  }
  return Damaged("the file has no ZIP end record: it is no ZIP archive, or truncated");
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

namespace {

constexpr uint64_t kAlignment = 64;
constexpr uint16_t kVersion = 45;  // the first with ZIP64
constexpr uint16_t kUtf8Names = 0x800;
constexpr uint16_t kPaddingExtra = 0x4246;  // "FB", PyTorch's own
constexpr uint16_t kEpoch = 0x21;           // 1 January 1980, the earliest possible date
constexpr uint32_t kInZip64 = 0xffffffffu;
constexpr uint64_t kZip64Bytes = 20;       // the extra field with two sizes
constexpr uint64_t kPaddingHeadBytes = 4;  // the header of an extra field

template <std::integral T>
void Append(std::string& to, T value) {
  to.append(reinterpret_cast<const char*>(&value), sizeof(value));
}

template <std::integral... T>
std::string Record(T... values) {
  std::string record;
  (Append(record, values), ...);
  return record;
}

}  // namespace

void ZipWriter::Put(const std::string& bytes) {
  out_.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  offset_ += bytes.size();
}

void ZipWriter::Add(const std::string& name, const std::string& text) {
  Add(name, std::as_bytes(std::span(text)));
}

void ZipWriter::Add(const std::string& name, std::span<const std::byte> bytes) {
  const uint32_t crc = Crc32(bytes);
  const uint64_t size = bytes.size(), header_offset = offset_;
  const uint64_t before =
      offset_ + kLocalHeaderBytes + name.size() + kZip64Bytes + kPaddingHeadBytes;
  const uint64_t padding = (kAlignment - before % kAlignment) % kAlignment;
  const auto extra_size = static_cast<uint16_t>(kZip64Bytes + kPaddingHeadBytes + padding);
  const auto name_size = static_cast<uint16_t>(name.size());
  std::string header = Record(uint32_t{0x04034b50}, kVersion, kUtf8Names, uint16_t{0}, uint16_t{0},
                              kEpoch, crc, kInZip64, kInZip64, name_size, extra_size);
  header += name;
  header += Record(kZip64Extra, uint16_t{16}, size, size);
  header += Record(kPaddingExtra, static_cast<uint16_t>(padding));
  header.append(padding, 'Z');
  Put(header);
  out_.write(reinterpret_cast<const char*>(bytes.data()), static_cast<std::streamsize>(size));
  offset_ += size;

  directory_ += Record(uint32_t{0x02014b50}, kVersion, kVersion, kUtf8Names, uint16_t{0},
                       uint16_t{0}, kEpoch, crc, kInZip64, kInZip64, name_size, uint16_t{28},
                       uint16_t{0}, uint16_t{0}, uint16_t{0}, uint32_t{0}, kInZip64);
  directory_ += name;
  directory_ += Record(kZip64Extra, uint16_t{24}, size, size, header_offset);
  ++entries_;
}

void ZipWriter::Finish() {
  const uint64_t begin = offset_, size = directory_.size();
  Put(directory_);
  const uint64_t end = offset_;
  Put(Record(uint32_t{0x06064b50}, uint64_t{44}, kVersion, kVersion, uint32_t{0}, uint32_t{0},
             entries_, entries_, size, begin));
  Put(Record(uint32_t{0x07064b50}, uint32_t{0}, end, uint32_t{1}));
  Put(Record(uint32_t{0x06054b50}, uint16_t{0}, uint16_t{0}, uint16_t{0xffff}, uint16_t{0xffff},
             kInZip64, kInZip64, uint16_t{0}));
}

}  // namespace crumb::calibration
