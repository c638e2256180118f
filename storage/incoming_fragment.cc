// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "storage/incoming_fragment.h"

#include <string>
#include <vector>

#include "common/crc32c.h"
#include "common/status_macros.h"

namespace crumb::storage {

absl::StatusOr<FragmentHeader> ReadCommitHeader(const CommitRequest& request) {
  if (request.fragment.size() <= request.tiles_bytes ||
      request.fragment.size() - request.tiles_bytes > FragmentHeaderBytes(kFragmentTilesMax)) {
    return absl::InvalidArgumentError("a fragment is its tiles and a header behind them");
  }
  const auto shared = request.fragment.subspan(request.tiles_bytes);
  const std::vector<std::byte> copy(shared.begin(), shared.end());
  CRUMB_ASSIGN_OR_RETURN(FragmentHeader header, DecodeFragmentHeader(copy));
  if (header.keyspace != request.keyspace) {
    return absl::InvalidArgumentError("the fragment's header names another keyspace");
  }
  if (header.generation != request.generation) {
    return absl::InvalidArgumentError("the fragment's header names generation " +
                                      std::to_string(header.generation) + " instead of " +
                                      std::to_string(request.generation));
  }
  if (copy.size() != FragmentHeaderBytes(header.range.tiles()) ||
      request.tiles_bytes != FragmentTilesBytes(header.range.tiles(), header.tile_bytes)) {
    return absl::InvalidArgumentError("the fragment's size differs from what its header says");
  }
  return header;
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
