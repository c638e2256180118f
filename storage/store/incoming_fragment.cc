// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "storage/store/incoming_fragment.h"

#include <algorithm>
#include <string>
#include <vector>

#include "common/crc32c.h"

namespace crumb::storage {

absl::StatusOr<FragmentHeader> TakeHeader(std::span<const std::byte> shared, size_t bytes_max) {
  shared = shared.first(std::min(shared.size(), bytes_max));
  const std::vector<std::byte> copy(shared.begin(), shared.end());
  return DecodeFragmentHeader(copy);
}

absl::Status CheckCommit(const CommitRequest& request) {
  const int tiles = request.header.range.tiles();
  if (tiles <= 0 || tiles > kFragmentTilesMax ||
      request.header.tile_sums.size() != static_cast<size_t>(tiles) ||
      request.tiles.size() != FragmentTilesBytes(tiles, request.header.tile_bytes)) {
    return absl::InvalidArgumentError("the fragment's size differs from what its header says");
  }
  return absl::OkStatus();
}

absl::Status CopyFragment(const FragmentHeader& header, std::span<const std::byte> source,
                          const TileRange& piece, std::span<std::byte> target) {
  FragmentHeader part = header;
  part.range = piece;
  part.tile_sums.clear();
  std::byte* to = target.data();
  for (int layer = piece.layers.begin; layer < piece.layers.end; ++layer) {
    for (int head = piece.heads.begin; head < piece.heads.end; ++head) {
      const auto tile =
          static_cast<size_t>((layer - header.range.layers.begin) * header.range.heads.size() +
                              (head - header.range.heads.begin));
      const auto from = source.subspan(tile * header.tile_bytes, header.tile_bytes);
      if (CopyCrc32c(to, from) != header.tile_sums[tile]) {
        return absl::DataLossError("checksum of tile " + std::to_string(tile) + " differs");
      }
      part.tile_sums.push_back(header.tile_sums[tile]);
      to += header.tile_bytes;
    }
  }
  EncodeFragmentHeader(part, target.subspan(static_cast<size_t>(to - target.data())));
  return absl::OkStatus();
}

}  // namespace crumb::storage
