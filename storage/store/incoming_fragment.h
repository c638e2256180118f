// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <span>

#include "absl/status/statusor.h"
#include "common/fragment_header.h"
#include "storage/tiered_store.h"

namespace crumb::storage {

// Decodes a header from a private copy of `shared`, which others may be writing to: each byte is
// read once, and nothing but the result may be believed afterwards. Bytes behind the header are
// ignored, and no more than `bytes_max` are looked at. Errors as DecodeFragmentHeader.
absl::StatusOr<FragmentHeader> TakeHeader(std::span<const std::byte> shared, size_t bytes_max);

// kInvalidArgument: the size of the tiles, or the number of their checksums, is not that of the
// header.
absl::Status CheckCommit(const CommitRequest& request);

// Copies the tiles of `piece`, a part of header.range, and a header for them to `target`, which has
// FragmentBytes(piece.tiles(), header.tile_bytes). `source` holds all tiles of header.range; each
// is summed as it is copied. kDataLoss: a sum differs from the header's.
absl::Status CopyFragment(const FragmentHeader& header, std::span<const std::byte> source,
                          const TileRange& piece, std::span<std::byte> target);

}  // namespace crumb::storage
