// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "client/fragment_reader.h"

#include <algorithm>

#include "common/status_macros.h"

namespace crumb::client {
namespace {

constexpr size_t kTileAlignment = 128;

absl::StatusOr<LeasedFragment> ReadOne(const Connection& connection, const v1::Fragments& at,
                                       int index) {
  CRUMB_ASSIGN_OR_RETURN(const std::span<const std::byte> bytes,
                         connection.SlabBytes(at.slabs(index), at.offsets(index)));
  const size_t tiles_bytes = at.header_offsets(index);
  if (tiles_bytes > bytes.size()) return absl::DataLossError("a header lies outside its slab");
  LeasedFragment fragment;
  fragment.page = static_cast<int>(at.pages(index));
  CRUMB_ASSIGN_OR_RETURN(fragment.header, DecodeFragmentHeader(bytes.subspan(tiles_bytes)));
  fragment.tiles = bytes.first(tiles_bytes);
  if (FragmentTilesBytes(fragment.header.range.tiles(), fragment.header.tile_bytes) !=
      tiles_bytes) {
    return absl::DataLossError("a fragment's size differs from its header's");
  }
  if (reinterpret_cast<uintptr_t>(bytes.data()) % kTileAlignment != 0) {
    return absl::DataLossError("a fragment is not aligned");
  }
  return fragment;
}

bool WellFormed(const v1::Fragments& at) {
  const int count = at.pages_size();
  return at.slabs_size() == count && at.offsets_size() == count &&
         at.header_offsets_size() == count;
}

MissReason Check(const LeasedFragment& fragment, const AcquireRequest& request, bool verify) {
  const MissReason identity =
      CheckIdentity(fragment.header, request.keyspace, request.keys[fragment.page]);
  if (identity != MissReason::kNone) return identity;
  if (fragment.header.generation != request.generation) return MissReason::kGeneration;
  if (verify && !fragment.VerifyTiles().ok()) return MissReason::kCorrupt;
  return MissReason::kNone;
}

}  // namespace

MissReason CheckIdentity(const FragmentHeader& header, const KeyspaceId& keyspace,
                         const PageKey& key) {
  const bool right =
      header.keyspace == keyspace && header.key == key && header.page_tokens == kPageTokens;
  return right ? MissReason::kNone : MissReason::kCorrupt;
}

ReadFragments ReadAnswer(const Connection& connection, const AcquireRequest& request,
                         const v1::AcquireResponse& answer,
                         const std::function<bool(int page)>& verify) {
  ReadFragments read;
  const v1::Fragments& at = answer.fragments();
  const int pages_max = static_cast<int>(std::min<size_t>(answer.hit_pages(), request.keys.size()));
  if (!WellFormed(at)) {
    read.miss_reason = MissReason::kCorrupt;
    return read;
  }
  read.fragments.reserve(at.pages_size());
  int index = 0;
  for (int page = 0; page < pages_max; ++page) {
    const size_t first = read.fragments.size();
    int covered = 0;
    for (; index < at.pages_size() && static_cast<int>(at.pages(index)) == page; ++index) {
      absl::StatusOr<LeasedFragment> fragment = ReadOne(connection, at, index);
      read.miss_reason =
          fragment.ok() ? Check(*fragment, request, verify(page)) : MissReason::kCorrupt;
      if (read.miss_reason != MissReason::kNone) break;
      covered +=
          request.range.has_value() ? Intersect(fragment->header.range, *request.range).tiles() : 0;
      read.fragments.push_back(*std::move(fragment));
    }
    if (read.miss_reason == MissReason::kNone && request.range.has_value() &&
        covered != request.range->tiles()) {
      read.miss_reason = MissReason::kNotCovered;
    }
    if (read.miss_reason != MissReason::kNone) {
      read.fragments.erase(read.fragments.begin() + static_cast<std::ptrdiff_t>(first),
                           read.fragments.end());
      return read;
    }
    ++read.hit_pages;
  }
  return read;
}

}  // namespace crumb::client
