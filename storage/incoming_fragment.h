// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <span>

#include "absl/status/statusor.h"
#include "common/fragment_header.h"
#include "storage/tiered_store.h"

namespace crumb::storage {

// Reads and checks a commit's header from a private copy; whoever sent it may change the source
// meanwhile. kDataLoss: not an intact header; kInvalidArgument: it is not what the request says.
absl::StatusOr<FragmentHeader> ReadCommitHeader(const CommitRequest& request);

// Copies the tiles of `piece`, a part of header.range, and a header for them to `target`, which has
// FragmentBytes(piece.tiles(), header.tile_bytes). Each tile is summed as it is copied. kDataLoss:
// a sum differs from the header's.
absl::Status CopyFragment(const FragmentHeader& header, std::span<const std::byte> source,
                          const TileRange& piece, std::span<std::byte> target);

}  // namespace crumb::storage
