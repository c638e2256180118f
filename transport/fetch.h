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

// What one crumbd asks of another and what it gets: pages, or parts of them, into its own memory.
namespace crumb::transport {

// Entitles to fetch; the serving crumbd gave it to an authenticated peer on the control plane.
using SessionToken = std::array<uint8_t, 16>;

// How one page of a fetch ended. Sent: values are frozen.
enum class PageStatus : uint8_t {
  kHit = 0,          // every wanted tile lies in its place, its sum verified
  kAbsent = 1,       // miss: the peer has no such page
  kNotCovered = 2,   // miss: its fragments do not cover the wanted layers and heads
  kStale = 3,        // miss: it is of another generation of the keyspace
  kRefused = 4,      // miss: the session is unknown, ended, or may not read this keyspace
  kBusy = 5,         // miss: the peer is at one of its bounds, back off
  kCorrupt = 6,      // header, key, keyspace or sum was not what was asked for: nothing may be used
  kDeadline = 7,     // miss: did not arrive in time
  kCancelled = 8,    // miss: Cancel was called
  kUnavailable = 9,  // miss: no connection, or it failed underway
};
inline constexpr int kPageStatusCount = 10;

// "hit", "absent", ...: for logs and metric labels.
const char* PageStatusName(PageStatus status);

// Whether a range has tiles, and not more than a fragment may. Takes any values.
constexpr bool IsTileRange(const TileRange& range) {
  const int64_t layers = range.layers.size(), heads = range.heads.size();
  return layers > 0 && heads > 0 && layers * heads <= kFragmentTilesMax;
}

// Where wanted tiles go: tile (layer, head) is written to
//   first + (layer - range.layers.begin) * layer_stride + (head - range.heads.begin) * head_stride.
// Strides are in bytes, 0 stands for densely packed, layer by layer and head by head.
struct TilePlaces {
  std::byte* first = nullptr;
  size_t layer_stride = 0;
  size_t head_stride = 0;
};

// A page, or a part of it.
struct PageWish {
  PageKey key;
  TileRange range;          // the wanted layers and global KV heads
  uint32_t tile_bytes = 0;  // of each; a page with other tiles is corrupt
  TilePlaces places;
};

// Up to TransportOptions::fetch_pages_max pages of one keyspace, in one request.
struct FetchRequest {
  SessionToken session{};
  KeyspaceId keyspace;
  uint64_t generation = 0;  // of the keyspace; pages of another one are kStale
  std::vector<PageWish> pages;
  TimePoint deadline = TimePoint::max();
  // Owns the memory that `places` point into. The transport lets go of it when nothing can write
  // there any more, which may be after `done` (quarantine: a transfer that the deadline overtook
  // and that cannot be called back). Whoever reuses the memory waits for that.
  std::shared_ptr<const void> memory;
};

// A fragment of which tiles were delivered: what its writer said about it.
struct FetchedFragment {
  FragmentHeader header;  // decoded and verified; names the whole fragment and all its sums
  TileRange delivered;    // the part of the wanted range that came from it
};

struct PageAnswer {
  PageStatus status = PageStatus::kUnavailable;
  // kHit: they cover the wanted range without overlap. Otherwise empty: what `places` point to is
  // undefined.
  std::vector<FetchedFragment> fragments;
};

struct FetchAnswer {
  std::vector<PageAnswer> pages;  // one per wish, in order
  // Why pages are kUnavailable, kCorrupt, kRefused or kBusy, if any is; for the log.
  // kFailedPrecondition: this transport and the peer's have no version in common, and nothing was
  // asked of it.
  absl::Status detail;
};

// Called once per accepted fetch, on the transport's progress thread: must not block. May call
// Fetch and Cancel.
using FetchDone = std::function<void(FetchAnswer)>;

using FetchId = uint64_t;

}  // namespace crumb::transport
