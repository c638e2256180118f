// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "common/clock.h"
#include "common/fragment_header.h"
#include "common/page_key.h"

// The request and the result of a fetch: pages, or parts of them, that one crumbd copies from
// another into its own memory.
namespace crumb::transport {

// Authorizes fetches. The serving crumbd issues it to an authenticated peer on the control plane.
using SessionToken = std::array<uint8_t, 16>;

// The outcome of one page of a fetch. Its values are part of the wire format and frozen.
enum class PageStatus : uint8_t {
  kHit = 0,          // every requested tile is in its place and its checksum is verified
  kAbsent = 1,       // miss: the peer does not have the page
  kNotCovered = 2,   // miss: its fragments do not cover the requested layers and heads
  kStale = 3,        // miss: it belongs to another generation of the keyspace
  kRefused = 4,      // miss: the session is unknown, ended, or may not read this keyspace
  kBusy = 5,         // miss: the peer has reached one of its bounds; back off
  kCorrupt = 6,      // header, key, keyspace or checksum is wrong: nothing may be used
  kDeadline = 7,     // miss: did not arrive in time
  kCancelled = 8,    // miss: Cancel was called
  kUnavailable = 9,  // miss: no connection, or the connection failed
};
inline constexpr int kPageStatusCount = 10;

// The name of a status in logs and metric labels: "hit", "absent" and so on.
constexpr const char* PageStatusName(PageStatus status) {
  constexpr std::array<const char*, kPageStatusCount> kNames = {
      "hit",  "absent",  "not_covered", "stale",     "refused",
      "busy", "corrupt", "deadline",    "cancelled", "unavailable"};
  const auto index = static_cast<size_t>(status);
  return index < kNames.size() ? kNames[index] : "unknown";
}

// Returns whether a range has tiles and not more of them than a fragment may have. Any values are
// allowed.
constexpr bool IsTileRange(const TileRange& range) {
  const int64_t layers = range.layers.size(), heads = range.heads.size();
  return layers > 0 && heads > 0 && layers * heads <= kFragmentTilesMax;
}

// The destination of the requested tiles: tile (layer, head) is written to
//   first + (layer - range.layers.begin) * layer_stride + (head - range.heads.begin) * head_stride.
// Strides are in bytes; 0 means that tiles are densely packed, layer by layer and head by head.
struct TilePlaces {
  std::byte* first = nullptr;
  size_t layer_stride = 0;
  size_t head_stride = 0;
};

// A requested page, or a part of it.
struct RequestedPage {
  PageKey key;
  TileRange range;          // the requested layers and global KV heads
  uint32_t tile_bytes = 0;  // size of each tile; a page with tiles of another size is corrupt
  TilePlaces places;
};

// Up to TransportOptions::fetch_pages_max pages of one keyspace, in one request.
//
// Fetch copies the request; `places` must stay valid until `memory` is dropped. Tiles are written
// as they arrive, also those of a page that ends as a miss, so that the memory of such a page has
// undefined contents. kHit alone promises that every requested tile is verified.
struct FetchRequest {
  SessionToken session{};
  KeyspaceId keyspace;
  uint64_t generation = 0;  // the keyspace's generation; pages of another one are kStale
  std::vector<RequestedPage> pages;
  TimePoint deadline = TimePoint::max();
  // Owns the memory that `places` point into. The transport drops this reference when nothing can
  // write to that memory any more. That may be after `done`: a transfer that the deadline overtook
  // cannot be cancelled, and its memory stays in quarantine until it ends. REQUIRES: the caller
  // reuses the memory only after the reference is dropped.
  std::shared_ptr<const void> memory;
};

// A fragment some of whose tiles were delivered.
struct FetchedFragment {
  FragmentHeader header;  // decoded and verified; describes the whole fragment with all checksums
  TileRange delivered;    // the part of the requested range that the fragment covers
};

struct PageResponse {
  PageStatus status = PageStatus::kUnavailable;
  // kHit: the fragments cover the requested range without overlap. Otherwise empty, and the
  // contents of the memory that `places` point to are undefined.
  std::vector<FetchedFragment> fragments;
};

// A miss of one page does not affect the others. It is always delivered, also if the connection
// fails: every accepted fetch gets exactly one FetchDone.
struct FetchResponse {
  std::vector<PageResponse> pages;  // one per requested page, in order
  // The reason, for the log, if a page is kUnavailable, kCorrupt, kRefused or kBusy.
  // kFailedPrecondition: this transport and the peer's have no common version, so that no request
  // was sent.
  absl::Status detail;
};

// Called once per accepted fetch on the transport's progress thread. REQUIRES: it does not block.
// It may call Fetch and Cancel.
using FetchDone = std::function<void(FetchResponse)>;

using FetchId = uint64_t;

}  // namespace crumb::transport
