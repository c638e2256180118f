// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/page_format.h"
#include "common/page_key.h"

// The header of a fragment, which names and checks its tiles: docs/formats/fragment.md. A fragment
// in a slot, in staging, in an extent or on the wire is its tiles, layer by layer and head by head,
// and then its header.
namespace crumb {

// A half-open range of layers or of global KV heads.
struct IndexRange {
  uint16_t begin = 0;
  uint16_t end = 0;

  constexpr int size() const { return end - begin; }
  constexpr bool Contains(IndexRange other) const {
    return begin <= other.begin && other.end <= end;
  }
  friend constexpr bool operator==(IndexRange, IndexRange) = default;
};

constexpr IndexRange Intersect(IndexRange a, IndexRange b) {
  const uint16_t begin = a.begin > b.begin ? a.begin : b.begin;
  const uint16_t end = a.end < b.end ? a.end : b.end;
  return begin < end ? IndexRange{begin, end} : IndexRange{};
}

// The layers and heads that a fragment holds or a reader wants.
struct TileRange {
  IndexRange layers;
  IndexRange heads;

  // Number of tiles, clamped to the range of an int: a corrupt range then exceeds the bound of
  // every fragment instead of overflowing.
  constexpr int tiles() const {
    return static_cast<int>(
        std::clamp<int64_t>(int64_t{layers.size()} * heads.size(), INT32_MIN, INT32_MAX));
  }
  friend constexpr bool operator==(const TileRange&, const TileRange&) = default;
};

constexpr TileRange Intersect(const TileRange& a, const TileRange& b) {
  return {Intersect(a.layers, b.layers), Intersect(a.heads, b.heads)};
}

struct FragmentHeader {
  PageFormat format = PageFormat::kInt2;
  bool over_int2_prefix = false;  // computed while the prefix was attended as INT2
  uint16_t page_tokens = kPageTokens;
  uint32_t layout_id = 1;
  uint32_t tile_bytes = 0;
  uint64_t generation = 0;  // generation of the keyspace
  KeyspaceId keyspace;
  PageKey key;
  PageKey parent;  // zeros for the first page of a sequence
  TileRange range;
  uint32_t position = 0;            // 1 + index of the page in its sequence; 0: unknown
  std::vector<uint32_t> tile_sums;  // CRC-32C of each tile, layer by layer and head by head

  friend bool operator==(const FragmentHeader&, const FragmentHeader&) = default;
};

// Tiles of one fragment at most; a header that claims more is refused.
inline constexpr int kFragmentTilesMax = 1 << 16;
// Bytes of one tile at most.
inline constexpr uint32_t kTileBytesMax = 1 << 20;

// Offset of the tile sums in an encoded header (docs/formats/fragment.md), which a checksum of the
// header follows.
inline constexpr size_t kTileSumsOffset = 144;
// Bytes of an encoded header with `tiles` tile sums.
constexpr size_t FragmentHeaderBytes(int tiles) {
  return kTileSumsOffset + 4 * static_cast<size_t>(tiles) + 4;
}
// Returns the bytes of the encoded header at `begin`, which was checked before.
size_t EncodedHeaderBytes(const std::byte* begin);

// Bytes of the tiles, and of tiles and header together.
constexpr size_t FragmentTilesBytes(int tiles, uint32_t tile_bytes) {
  return static_cast<size_t>(tiles) * tile_bytes;
}
constexpr size_t FragmentBytes(int tiles, uint32_t tile_bytes) {
  return FragmentTilesBytes(tiles, tile_bytes) + FragmentHeaderBytes(tiles);
}

// Writes FragmentHeaderBytes(header.range.tiles()) bytes to `out`, which has exactly that size.
// header.tile_sums.size() must equal header.range.tiles().
void EncodeFragmentHeader(const FragmentHeader& header, std::span<std::byte> out);

// Reads an encoded header; bytes behind it are ignored. kDataLoss: not a header, damaged, or
// truncated; kFailedPrecondition: written by a version this one cannot read.
absl::StatusOr<FragmentHeader> DecodeFragmentHeader(std::span<const std::byte> bytes);

// A decoded header whose checksums stay in the encoded bytes.
struct FragmentHeaderView {
  FragmentHeader header;                // its tile_sums are empty
  std::span<const uint32_t> tile_sums;  // views the encoded bytes
};

// Decodes like DecodeFragmentHeader. kDataLoss also if `bytes` are not aligned to four bytes.
absl::StatusOr<FragmentHeaderView> ViewFragmentHeader(std::span<const std::byte> bytes);

// Range and tile size of an encoded header that was checked before, without checking it again.
struct FragmentShape {
  TileRange range;
  uint32_t tile_bytes = 0;
};
FragmentShape ShapeOfHeader(std::span<const std::byte> bytes);

// kDataLoss naming the first tile whose sum differs. `tiles` holds all tiles of the fragment.
absl::Status VerifyTileSums(const FragmentHeader& header, std::span<const std::byte> tiles);
// VerifyTileSums with `sums` instead of the header's own.
absl::Status VerifyTileSums(const FragmentHeader& header, std::span<const uint32_t> sums,
                            std::span<const std::byte> tiles);

}  // namespace crumb
