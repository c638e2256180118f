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
  CRUMB_ASSIGN_OR_RETURN(FragmentHeaderView view, ViewFragmentHeader(bytes.subspan(tiles_bytes)));
  fragment.header = std::move(view.header);
  fragment.tile_sums = view.tile_sums;
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

// The fragment at `index`, as far as its place is told.
absl::Status ReadDeviceOne(const AcquireRequest& request, const v1::DeviceFragments& at, int index,
                           DeviceFragment& fragment) {
  const size_t pool = at.pools(index);
  if (at.shapes(index) >= static_cast<uint32_t>(at.shape_size()) ||
      pool >= request.pools.size() + request.peers.size()) {
    return absl::DataLossError("a fragment on a device has no shape or pool");
  }
  fragment.page = static_cast<int>(at.pages(index));
  fragment.slot = at.slots(index);
  fragment.pool = pool < request.pools.size() ? request.pools[pool]
                                              : request.peers[pool - request.pools.size()];
  const v1::DeviceFragments::Shape& shape = at.shape(static_cast<int>(at.shapes(index)));
  FragmentHeader& header = fragment.header;
  header.range = {{static_cast<uint16_t>(shape.range().layer_begin()),
                   static_cast<uint16_t>(shape.range().layer_end())},
                  {static_cast<uint16_t>(shape.range().head_begin()),
                   static_cast<uint16_t>(shape.range().head_end())}};
  header.format = static_cast<PageFormat>(shape.format());
  header.over_int2_prefix = shape.over_int2_prefix();
  header.layout_id = shape.layout_id();
  header.tile_bytes = shape.tile_bytes();
  header.generation = shape.generation();
  header.keyspace = request.keyspace;
  header.key = request.keys[static_cast<size_t>(fragment.page)];
  if (at.headers_size() == 0 || at.headers(index).empty()) return absl::OkStatus();
  const std::string& encoded = at.headers(index);
  CRUMB_ASSIGN_OR_RETURN(
      header, DecodeFragmentHeader(std::as_bytes(std::span(encoded.data(), encoded.size()))));
  return absl::OkStatus();
}

bool WellFormed(const v1::DeviceFragments& at) {
  const int count = at.pages_size();
  return at.pools_size() == count && at.slots_size() == count && at.shapes_size() == count &&
         (at.headers_size() == count || at.headers_size() == 0);
}

MissReason CheckDevice(const DeviceFragment& fragment, const AcquireRequest& request) {
  const MissReason identity =
      CheckIdentity(fragment.header, request.keyspace, request.keys[fragment.page]);
  if (identity != MissReason::kNone) return identity;
  return fragment.header.generation == request.generation ? MissReason::kNone
                                                          : MissReason::kGeneration;
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
  const v1::DeviceFragments& on_device = answer.device_fragments();
  if (!WellFormed(at) || !WellFormed(on_device)) {
    read.miss_reason = MissReason::kCorrupt;
    return read;
  }
  read.fragments.reserve(at.pages_size());
  read.device_fragments.reserve(on_device.pages_size());
  const std::optional<TileRange>& needed = request.own.has_value() ? request.own : request.range;
  int index = 0;
  int device_index = 0;
  for (int page = 0; page < pages_max; ++page) {
    const size_t first = read.fragments.size();
    const size_t device_first = read.device_fragments.size();
    int covered = 0;
    for (; index < at.pages_size() && static_cast<int>(at.pages(index)) == page; ++index) {
      absl::StatusOr<LeasedFragment> fragment = ReadOne(connection, at, index);
      read.miss_reason =
          fragment.ok() ? Check(*fragment, request, verify(page)) : MissReason::kCorrupt;
      if (read.miss_reason != MissReason::kNone) break;
      covered += needed.has_value() ? Intersect(fragment->header.range, *needed).tiles() : 0;
      read.fragments.push_back(*std::move(fragment));
    }
    for (; read.miss_reason == MissReason::kNone && device_index < on_device.pages_size() &&
           static_cast<int>(on_device.pages(device_index)) == page;
         ++device_index) {
      DeviceFragment& fragment = read.device_fragments.emplace_back();
      read.miss_reason = ReadDeviceOne(request, on_device, device_index, fragment).ok()
                             ? CheckDevice(fragment, request)
                             : MissReason::kCorrupt;
      if (read.miss_reason != MissReason::kNone) break;
      covered += needed.has_value() ? Intersect(fragment.header.range, *needed).tiles() : 0;
    }
    if (read.miss_reason == MissReason::kNone && needed.has_value() && covered != needed->tiles()) {
      read.miss_reason = MissReason::kNotCovered;
    }
    if (read.miss_reason != MissReason::kNone) {
      read.fragments.erase(read.fragments.begin() + static_cast<std::ptrdiff_t>(first),
                           read.fragments.end());
      read.device_fragments.erase(
          read.device_fragments.begin() + static_cast<std::ptrdiff_t>(device_first),
          read.device_fragments.end());
      return read;
    }
    ++read.hit_pages;
  }
  return read;
}

}  // namespace crumb::client
