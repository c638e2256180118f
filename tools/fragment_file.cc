// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "tools/fragment_file.h"

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <string_view>

#include "common/errno_status.h"
#include "common/status_macros.h"

namespace crumb::tools {
namespace {

// The first bytes of an encoded header (docs/formats/fragment.md).
constexpr std::string_view kHeaderMagic = "CRMB";
// The largest file, in bytes, that is read into memory.
constexpr uint64_t kFileBytesMax = uint64_t{1} << 30;

bool MagicAt(std::span<const std::byte> bytes, size_t offset) {
  return std::memcmp(bytes.data() + offset, kHeaderMagic.data(), kHeaderMagic.size()) == 0;
}

// Finds the header, which ends with the file. Its length depends on the number of tiles, so that
// every number yields one offset at which it may begin. The error is that of the most likely
// offset.
absl::StatusOr<size_t> FindHeader(std::span<const std::byte> bytes) {
  absl::Status why =
      absl::DataLossError("no fragment header at the end: not a fragment file, or cut short");
  for (int tiles = 1; tiles <= kFragmentTilesMax; ++tiles) {
    const size_t header_bytes = FragmentHeaderBytes(tiles);
    if (header_bytes >= bytes.size()) break;
    const size_t offset = bytes.size() - header_bytes;
    if (!MagicAt(bytes, offset)) continue;
    const auto header = DecodeFragmentHeader(bytes.subspan(offset));
    if (!header.ok()) {
      why = header.status();
    } else if (offset != FragmentTilesBytes(header->range.tiles(), header->tile_bytes)) {
      why = absl::DataLossError("the header describes " + std::to_string(header->range.tiles()) +
                                " tiles of " + std::to_string(header->tile_bytes) +
                                " bytes, before it are " + std::to_string(offset) + " bytes");
    } else {
      return offset;
    }
  }
  return why;
}

}  // namespace

absl::StatusOr<FragmentFile> ParseFragment(std::vector<std::byte> bytes) {
  CRUMB_ASSIGN_OR_RETURN(const size_t offset, FindHeader(bytes));
  FragmentFile file;
  CRUMB_ASSIGN_OR_RETURN(file.header, DecodeFragmentHeader(std::span(bytes).subspan(offset)));
  bytes.resize(offset);
  file.tiles = std::move(bytes);
  return file;
}

absl::StatusOr<FragmentFile> ReadFragmentFile(const std::string& path) {
  std::error_code error;
  const uint64_t size = std::filesystem::file_size(path, error);
  if (error) return ErrnoStatus(error.value(), path);
  if (size > kFileBytesMax) {
    return absl::InvalidArgumentError(path + ": " + std::to_string(size) +
                                      " bytes are more than a fragment has");
  }
  std::vector<std::byte> bytes(size);
  std::ifstream in(path, std::ios::binary);
  if (!in.read(reinterpret_cast<char*>(bytes.data()), static_cast<std::streamsize>(size))) {
    return ErrnoStatus(errno, path);
  }
  auto file = ParseFragment(std::move(bytes));
  if (file.ok()) return file;
  return absl::Status(file.status().code(), path + ": " + std::string(file.status().message()));
}

absl::Status WriteFragmentFile(const std::string& path, const FragmentHeader& header,
                               std::span<const std::byte> tiles) {
  std::vector<std::byte> encoded(FragmentHeaderBytes(header.range.tiles()));
  EncodeFragmentHeader(header, encoded);
  std::ofstream out(path, std::ios::binary | std::ios::trunc);
  if (!out) return ErrnoStatus(errno, path);
  out.write(reinterpret_cast<const char*>(tiles.data()),
            static_cast<std::streamsize>(tiles.size()));
  out.write(reinterpret_cast<const char*>(encoded.data()),
            static_cast<std::streamsize>(encoded.size()));
  out.close();
  return out ? absl::OkStatus() : ErrnoStatus(errno, path);
}

}  // namespace crumb::tools
