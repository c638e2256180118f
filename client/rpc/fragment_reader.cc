// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "client/rpc/fragment_reader.h"

#include <algorithm>

#include "common/fragment_header.h"

namespace crumb::client {
namespace {

bool WellFormed(const v1::Fragments& at) {
  const int count = at.pages_size();
  return at.slabs_size() == count && at.offsets_size() == count &&
         at.header_offsets_size() == count;
}

// Owns the response's messages and headers that DeviceFragments refer to.
struct DeviceFragmentStore {
  v1::DeviceFragments at;
  std::vector<FragmentHeader> shapes;
};

bool WellFormed(const v1::DeviceFragments& at) {
  const int count = at.pages_size();
  return at.pools_size() == count && at.slots_size() == count && at.shapes_size() == count &&
         (at.headers_size() == count || at.headers_size() == 0);
}

std::shared_ptr<const DeviceFragmentStore> TakeDeviceFragments(const AcquireRequest& request,
                                                               v1::DeviceFragments* at) {
  auto store = std::make_shared<DeviceFragmentStore>();
  store->at.Swap(at);
  store->shapes.reserve(static_cast<size_t>(store->at.shape_size()));
  for (const v1::DeviceFragments::Shape& shape : store->at.shape()) {
    FragmentHeader& header = store->shapes.emplace_back();
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
  }
  return store;
}

bool SameShape(const FragmentHeader& a, const FragmentHeader& b) {
  return a.range == b.range && a.format == b.format && a.tile_bytes == b.tile_bytes &&
         a.layout_id == b.layout_id && a.over_int2_prefix == b.over_int2_prefix &&
         a.generation == b.generation;
}

// Decodes the header of a fragment whose shape and slot are known.
MissReason ReadDeviceHeader(const AcquireRequest& request, const std::string& encoded,
                            DeviceFragment& fragment) {
  fragment.header = std::as_bytes(std::span(encoded.data(), encoded.size()));
  const absl::StatusOr<FragmentHeaderView> view = ViewFragmentHeader(fragment.header);
  if (!view.ok() || !SameShape(view->header, *fragment.shape)) return MissReason::kCorrupt;
  fragment.tile_sums = view->tile_sums;
  return CheckIdentity(view->header, request.keyspace,
                       request.keys[static_cast<size_t>(fragment.page)]);
}

// Sets the checksums of the request's peer_sums tiles, for a fragment whose shape is known. Returns
// false if the message has too few.
bool ReadFirstSums(const AcquireRequest& request, const std::string& sums, size_t* at,
                   DeviceFragment& fragment) {
  const std::optional<TileRange>& tiles = request.peer_sums;
  if (!tiles.has_value() || sums.empty()) return true;
  if (Intersect(fragment.shape->range, *tiles) != *tiles) return true;
  const size_t bytes = sizeof(uint32_t) * static_cast<size_t>(tiles->tiles());
  if (sums.size() - *at < bytes) return false;
  fragment.tile_sums = {reinterpret_cast<const uint32_t*>(sums.data() + *at),
                        static_cast<size_t>(tiles->tiles())};
  *at += bytes;
  return true;
}

// `sums_at` is the number of bytes of sums that belong to the fragments before this one.
MissReason ReadDeviceOne(const AcquireRequest& request, const DeviceFragmentStore& store, int index,
                         size_t* sums_at, DeviceFragment& fragment) {
  const v1::DeviceFragments& at = store.at;
  const size_t pool = at.pools(index), shape = at.shapes(index);
  if (shape >= store.shapes.size() || pool >= request.pools.size() + request.peers.size()) {
    return MissReason::kCorrupt;
  }
  fragment.page = static_cast<int>(at.pages(index));
  fragment.slot = at.slots(index);
  fragment.pool = pool < request.pools.size() ? request.pools[pool]
                                              : request.peers[pool - request.pools.size()];
  fragment.shape = &store.shapes[shape];
  if (at.headers_size() > 0 && !at.headers(index).empty()) {
    const MissReason read = ReadDeviceHeader(request, at.headers(index), fragment);
    if (read != MissReason::kNone) return read;
  } else if (pool >= request.pools.size() &&
             !ReadFirstSums(request, at.sums(), sums_at, fragment)) {
    return MissReason::kCorrupt;
  }
  return fragment.shape->generation == request.generation ? MissReason::kNone
                                                          : MissReason::kGeneration;
}

// Reads fragment `index` of the response and checks it; with `verify` its tiles, too.
MissReason ReadOne(const Connection& connection, const AcquireRequest& request,
                   const v1::Fragments& at, int index, bool verify, LeasedFragment& fragment) {
  const auto bytes = connection.SlabBytes(at.slabs(index), at.offsets(index));
  const size_t tiles_bytes = at.header_offsets(index);
  const bool placed = bytes.ok() && tiles_bytes <= bytes->size() &&
                      reinterpret_cast<uintptr_t>(bytes->data()) % kTileAlignment == 0;
  if (!placed) return MissReason::kCorrupt;
  absl::StatusOr<FragmentHeaderView> view = ViewFragmentHeader(bytes->subspan(tiles_bytes));
  if (!view.ok() ||
      FragmentTilesBytes(view->header.range.tiles(), view->header.tile_bytes) != tiles_bytes) {
    return MissReason::kCorrupt;
  }
  fragment.page = static_cast<int>(at.pages(index));
  fragment.header = std::move(view->header);
  fragment.tile_sums = view->tile_sums;
  fragment.tiles = bytes->first(tiles_bytes);
  const MissReason identity =
      CheckIdentity(fragment.header, request.keyspace, request.keys[fragment.page]);
  if (identity != MissReason::kNone) return identity;
  if (fragment.header.generation != request.generation) return MissReason::kGeneration;
  return verify && !fragment.VerifyTiles().ok() ? MissReason::kCorrupt : MissReason::kNone;
}

}  // namespace

MissReason CheckIdentity(const FragmentHeader& header, const KeyspaceId& keyspace,
                         const PageKey& key) {
  const bool right =
      header.keyspace == keyspace && header.key == key && header.page_tokens == kPageTokens;
  return right ? MissReason::kNone : MissReason::kCorrupt;
}

ReadFragments ReadAcquireResponse(const Connection& connection, const AcquireRequest& request,
                                  v1::AcquireResponse& response,
                                  const std::function<bool(int page)>& verify) {
  ReadFragments read;
  const v1::Fragments& at = response.fragments();
  const int pages_max =
      static_cast<int>(std::min<size_t>(response.hit_pages(), request.keys.size()));
  if (!WellFormed(at) || !WellFormed(response.device_fragments())) {
    read.miss_reason = MissReason::kCorrupt;
    return read;
  }
  const auto store = TakeDeviceFragments(request, response.mutable_device_fragments());
  const v1::DeviceFragments& on_device = store->at;
  read.device_store = store;
  read.fragments.reserve(at.pages_size());
  read.device_fragments.reserve(on_device.pages_size());
  const std::optional<TileRange>& needed = request.own.has_value() ? request.own : request.range;
  int index = 0;
  int device_index = 0;
  size_t sums_at = 0;
  for (int page = 0; page < pages_max; ++page) {
    const size_t first = read.fragments.size();
    const size_t device_first = read.device_fragments.size();
    int covered = 0;
    for (; index < at.pages_size() && static_cast<int>(at.pages(index)) == page; ++index) {
      LeasedFragment& fragment = read.fragments.emplace_back();
      read.miss_reason = ReadOne(connection, request, at, index, verify(page), fragment);
      if (read.miss_reason != MissReason::kNone) break;
      covered += needed.has_value() ? Intersect(fragment.header.range, *needed).tiles() : 0;
    }
    for (; read.miss_reason == MissReason::kNone && device_index < on_device.pages_size() &&
           static_cast<int>(on_device.pages(device_index)) == page;
         ++device_index) {
      DeviceFragment& fragment = read.device_fragments.emplace_back();
      read.miss_reason = ReadDeviceOne(request, *store, device_index, &sums_at, fragment);
      if (read.miss_reason != MissReason::kNone) break;
      covered += needed.has_value() ? Intersect(fragment.shape->range, *needed).tiles() : 0;
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
