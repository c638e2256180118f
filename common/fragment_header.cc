// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "common/fragment_header.h"

#include <algorithm>
#include <span>
#include <string>

#include "common/crc32c.h"
#include "common/little_endian.h"

namespace crumb {
namespace {

static_assert(static_cast<int>(PageFormat::kBf16) == 1);
static_assert(static_cast<int>(PageFormat::kInt2) == 2);

constexpr uint32_t kMagic = 0x424D5243;  // "CRMB"
constexpr uint16_t kVersion = 1;
constexpr uint16_t kMinimumReader = 1;
constexpr size_t kSizeOffset = 8;
constexpr uint8_t kFlagOverInt2 = 1;

template <typename Id>
void StoreId(std::byte* to, const Id& id) {
  std::memcpy(to, id.bytes.data(), id.bytes.size());
}

template <typename Id>
void LoadId(const std::byte* from, Id& id) {
  std::memcpy(id.bytes.data(), from, id.bytes.size());
}

absl::Status CheckEnvelope(std::span<const std::byte> bytes) {
  if (bytes.size() < FragmentHeaderBytes(0))
    return absl::DataLossError("fragment header truncated");
  if (LoadLittle<uint32_t>(bytes.data()) != kMagic) {
    return absl::DataLossError("no fragment header: wrong magic");
  }
  const size_t size = LoadLittle<uint32_t>(bytes.data() + kSizeOffset);
  if (size < FragmentHeaderBytes(0) || size > FragmentHeaderBytes(kFragmentTilesMax)) {
    return absl::DataLossError("fragment header claims " + std::to_string(size) + " bytes");
  }
  if (bytes.size() < size) return absl::DataLossError("fragment header truncated");
  const uint32_t sum = LoadLittle<uint32_t>(bytes.data() + size - 4);
  if (Crc32c(bytes.first(size - 4)) != sum) {
    return absl::DataLossError("fragment header damaged: checksum differs");
  }
  const auto minimum_reader = LoadLittle<uint16_t>(bytes.data() + 6);
  if (minimum_reader > kVersion) {
    return absl::FailedPreconditionError("fragment needs a reader of version " +
                                         std::to_string(minimum_reader) + ", this one is " +
                                         std::to_string(kVersion));
  }
  return absl::OkStatus();
}

absl::Status CheckFields(const FragmentHeader& header, uint32_t tiles, size_t size) {
  const bool format_known =
      header.format == PageFormat::kBf16 || header.format == PageFormat::kInt2;
  const bool ranges_ordered = header.range.layers.begin < header.range.layers.end &&
                              header.range.heads.begin < header.range.heads.end;
  if (!format_known || !ranges_ordered || header.tile_bytes == 0 ||
      header.tile_bytes > kTileBytesMax || header.page_tokens == 0) {
    return absl::DataLossError("fragment header holds impossible values");
  }
  if (tiles != static_cast<uint32_t>(header.range.tiles()) ||
      size != FragmentHeaderBytes(header.range.tiles())) {
    return absl::DataLossError("fragment header's tile count differs from its ranges");
  }
  return absl::OkStatus();
}

}  // namespace

void EncodeFragmentHeader(const FragmentHeader& header, std::span<std::byte> out) {
  std::byte* to = out.data();
  StoreLittle(to, kMagic);
  StoreLittle(to + 4, kVersion);
  StoreLittle(to + 6, kMinimumReader);
  StoreLittle(to + 8, static_cast<uint32_t>(out.size()));
  StoreLittle(to + 12, static_cast<uint8_t>(header.format));
  StoreLittle(to + 13, header.over_int2_prefix ? kFlagOverInt2 : uint8_t{0});
  StoreLittle(to + 14, header.page_tokens);
  StoreLittle(to + 16, header.layout_id);
  StoreLittle(to + 20, header.tile_bytes);
  StoreLittle(to + 24, header.generation);
  StoreId(to + 32, header.keyspace);
  StoreId(to + 64, header.key);
  StoreId(to + 96, header.parent);
  StoreLittle(to + 128, header.range.layers.begin);
  StoreLittle(to + 130, header.range.layers.end);
  StoreLittle(to + 132, header.range.heads.begin);
  StoreLittle(to + 134, header.range.heads.end);
  StoreLittle(to + 136, static_cast<uint32_t>(header.tile_sums.size()));
  StoreLittle(to + 140, header.position);
  std::ranges::copy(std::as_bytes(std::span(header.tile_sums)), to + kTileSumsOffset);
  StoreLittle(to + out.size() - 4, Crc32c(out.first(out.size() - 4)));
}

namespace {

// All but the sums.
absl::StatusOr<FragmentHeader> DecodeFields(std::span<const std::byte> bytes) {
  if (absl::Status status = CheckEnvelope(bytes); !status.ok()) return status;
  const std::byte* from = bytes.data();
  FragmentHeader header;
  header.format = static_cast<PageFormat>(from[12]);
  header.over_int2_prefix = (static_cast<uint8_t>(from[13]) & kFlagOverInt2) != 0;
  header.page_tokens = LoadLittle<uint16_t>(from + 14);
  header.layout_id = LoadLittle<uint32_t>(from + 16);
  header.tile_bytes = LoadLittle<uint32_t>(from + 20);
  header.generation = LoadLittle<uint64_t>(from + 24);
  LoadId(from + 32, header.keyspace);
  LoadId(from + 64, header.key);
  LoadId(from + 96, header.parent);
  header.range.layers = {LoadLittle<uint16_t>(from + 128), LoadLittle<uint16_t>(from + 130)};
  header.range.heads = {LoadLittle<uint16_t>(from + 132), LoadLittle<uint16_t>(from + 134)};
  const auto tiles = LoadLittle<uint32_t>(from + 136);
  header.position = LoadLittle<uint32_t>(from + 140);
  const size_t size = LoadLittle<uint32_t>(from + 8);
  if (absl::Status status = CheckFields(header, tiles, size); !status.ok()) return status;
  return header;
}

}  // namespace

absl::StatusOr<FragmentHeader> DecodeFragmentHeader(std::span<const std::byte> bytes) {
  absl::StatusOr<FragmentHeader> header = DecodeFields(bytes);
  if (!header.ok()) return header;
  const auto tiles = static_cast<size_t>(header->range.tiles());
  header->tile_sums.resize(tiles);
  std::memcpy(header->tile_sums.data(), bytes.data() + kTileSumsOffset, 4 * tiles);
  return header;
}

absl::StatusOr<FragmentHeaderView> ViewFragmentHeader(std::span<const std::byte> bytes) {
  if (reinterpret_cast<uintptr_t>(bytes.data()) % alignof(uint32_t) != 0) {
    return absl::DataLossError("fragment header is not aligned");
  }
  absl::StatusOr<FragmentHeader> header = DecodeFields(bytes);
  if (!header.ok()) return header.status();
  const auto tiles = static_cast<size_t>(header->range.tiles());
  const auto* sums = reinterpret_cast<const uint32_t*>(bytes.data() + kTileSumsOffset);
  return FragmentHeaderView{*std::move(header), std::span(sums, tiles)};
}

size_t EncodedHeaderBytes(const std::byte* begin) {
  return LoadLittle<uint32_t>(begin + kSizeOffset);
}

FragmentShape ShapeOfHeader(std::span<const std::byte> bytes) {
  const std::byte* from = bytes.data();
  return {{{LoadLittle<uint16_t>(from + 128), LoadLittle<uint16_t>(from + 130)},
           {LoadLittle<uint16_t>(from + 132), LoadLittle<uint16_t>(from + 134)}},
          LoadLittle<uint32_t>(from + 20)};
}

absl::Status VerifyTileSums(const FragmentHeader& header, std::span<const std::byte> tiles) {
  return VerifyTileSums(header, header.tile_sums, tiles);
}

absl::Status VerifyTileSums(const FragmentHeader& header, std::span<const uint32_t> sums,
                            std::span<const std::byte> tiles) {
  if (tiles.size() != FragmentTilesBytes(header.range.tiles(), header.tile_bytes)) {
    return absl::DataLossError(
        "fragment has " + std::to_string(tiles.size()) + " bytes of tiles, its header says " +
        std::to_string(header.range.tiles()) + " tiles of " + std::to_string(header.tile_bytes));
  }
  for (size_t i = 0; i < sums.size(); ++i) {
    if (Crc32c(tiles.subspan(i * header.tile_bytes, header.tile_bytes)) != sums[i]) {
      return absl::DataLossError("checksum of tile " + std::to_string(i) + " differs");
    }
  }
  return absl::OkStatus();
}

}  // namespace crumb
