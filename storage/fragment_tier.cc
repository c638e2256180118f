// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "storage/fragment_tier.h"

#include "common/status_macros.h"
#include "storage/coverage.h"

namespace crumb::storage {

std::vector<TileRange> FragmentTier::Present(const KeyspaceId& keyspace, const PageKey& key,
                                             uint64_t generation) const {
  std::vector<TileRange> ranges;
  for (const FragmentMeta& fragment : Find(keyspace, key)) {
    if (fragment.generation >= generation) ranges.push_back(fragment.range);
  }
  return ranges;
}

bool FragmentTier::Has(const FragmentMeta& fragment) const {
  return Covers(Present(fragment.keyspace, fragment.key, fragment.generation), fragment.range);
}

absl::StatusOr<FragmentHeader> CheckFragmentHeader(const FragmentMeta& meta,
                                                   std::span<const std::byte> fragment) {
  if (fragment.size() < meta.bytes || meta.bytes < meta.tiles_bytes) {
    return absl::DataLossError("fragment is shorter than its index entry says");
  }
  CRUMB_ASSIGN_OR_RETURN(
      const FragmentHeader header,
      DecodeFragmentHeader(fragment.subspan(meta.tiles_bytes, meta.bytes - meta.tiles_bytes)));
  if (header.keyspace != meta.keyspace || header.key != meta.key) {
    return absl::DataLossError("fragment belongs to another page");
  }
  if (header.generation != meta.generation) {
    return absl::DataLossError("fragment belongs to another generation of its keyspace");
  }
  if (header.range != meta.range) {
    return absl::DataLossError("fragment holds other layers or heads");
  }
  if (FragmentTilesBytes(header.range.tiles(), header.tile_bytes) != meta.tiles_bytes) {
    return absl::DataLossError("fragment has tiles of another size");
  }
  return header;
}

absl::Status VerifyFragment(const FragmentMeta& meta, std::span<const std::byte> fragment) {
  CRUMB_ASSIGN_OR_RETURN(const FragmentHeader header, CheckFragmentHeader(meta, fragment));
  return VerifyTileSums(header, fragment.first(meta.tiles_bytes));
}

}  // namespace crumb::storage
