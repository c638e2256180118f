// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "calibration/zip_writer.h"

#include <concepts>

#include "calibration/crc32.h"

// Names of fields and records: PKWARE APPNOTE.TXT 6.3.
namespace crumb::calibration {
namespace {

constexpr uint64_t kAlignment = 64;
constexpr uint64_t kLocalHeaderBytes = 30;
constexpr uint16_t kVersion = 45;  // the first with ZIP64
constexpr uint16_t kUtf8Names = 0x800;
constexpr uint16_t kZip64Extra = 1;
constexpr uint16_t kPaddingExtra = 0x4246;  // "FB", PyTorch's own
constexpr uint16_t kEpoch = 0x21;           // 1 January 1980, the earliest date there is
constexpr uint32_t kInZip64 = 0xffffffffu;
constexpr uint64_t kZip64Bytes = 20;       // of the extra field with two sizes
constexpr uint64_t kPaddingHeadBytes = 4;  // of an extra field

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
