// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "transport/fetch.h"
#include "transport/frame.h"

namespace crumb::transport {

// The tiles of one frame.
// Tiles [first, first + count) of the delivered part of fragment number `fragment` of page number
// `page`.
struct TileBatch {
  uint32_t page = 0;
  uint16_t fragment = 0;
  uint32_t first = 0;
  uint32_t count = 0;
};

// The requesting side of a fetch. It validates the peer's frames and writes verified tiles to their
// places. A page has no response at first, then is open (it is a hit, and tiles are missing), then
// ended. Not thread-safe; belongs to the progress thread.
//
// Everything that a peer sends is checked against the request: the number of pages, the headers'
// checksum, key, keyspace and tile size, that fragments cover the range without overlap, and that
// each tile arrives once and has the checksum of its header. Frames that contradict this are
// kDataLoss, which ends the connection; a page whose header or tiles are wrong is kCorrupt.
//
//   no response --hit--> open --last tile verified--> ended (kHit)
//       |                 '--a tile differs, or a transfer fails--> ended (kCorrupt, kUnavailable)
//       '--miss, or wrong headers--> ended
//
// A tile is claimed before it is written, so that no tile is written twice.
class IncomingFetch {
 public:
  // Returns kInvalidArgument with the reason if a request is malformed. Any thread may call it.
  static absl::Status Check(const FetchRequest& request, size_t pages_max);

  // REQUIRES: Check accepted the request.
  explicit IncomingFetch(FetchRequest request);

  // Returns the body of the kFetch, with the time that is left at `now`.
  FetchBody Body(TimePoint now) const;

  // Processes the body of a kResponse. kDataLoss: it is malformed, so the connection must be
  // closed.
  absl::Status TakeResponse(std::span<const std::byte> body);

  // Claims the tiles of a kData frame with a body of `bytes`. Returns nothing if the page has ended
  // as a miss. kDataLoss: the tiles do not belong to the response, or were claimed before.
  absl::StatusOr<std::optional<TileBatch>> Claim(const FrameHeader& header, size_t bytes);

  // Copies the tiles of a claimed batch to their places and verifies them.
  void Deliver(const TileBatch& batch, std::span<const std::byte> tiles);

  // A claimed batch may instead be written by a transfer: Places returns its places in order, with
  // adjacent ones joined, and Land takes the outcome of the transfer and verifies the tiles in
  // place.
  std::vector<std::span<std::byte>> Places(const TileBatch& batch) const;
  void Land(const TileBatch& batch, const absl::Status& outcome);

  // Returns whether every page has ended.
  bool complete() const { return responded_ == pages_.size() && open_pages_ == 0; }

  // Ends the remaining pages with the status `rest` and moves the response out. REQUIRES: it is
  // called once; only Land may follow.
  FetchResponse Finish(PageStatus rest, const absl::Status& detail);

  // Returns the request, with strides of 0 replaced by the dense ones.
  const FetchRequest& request() const { return request_; }
  // Drops the reference to the destination's memory. REQUIRES: no transfer writes to it any more.
  void DropMemory() { request_.memory.reset(); }
  // Returns the bytes of a batch's tiles.
  size_t BatchBytes(const TileBatch& batch) const {
    return size_t{batch.count} * request_.pages[batch.page].tile_bytes;
  }

 private:
  struct Fragment {
    FetchedFragment what;
    std::vector<bool> claimed;  // per tile of what.delivered
  };
  struct Page {
    bool ended = false;
    PageStatus status = PageStatus::kUnavailable;
    std::vector<Fragment> fragments;
    uint32_t tiles_left = 0;
  };

  // Takes one page of a response: ends it as a miss, or opens it.
  void TakePage(Page& page, const RequestedPage& requested, const ResponseBody::Page& response);
  // Adds a fragment to an open page and marks its tiles in `covered`. Returns kHit, or the status
  // with which the page ends.
  PageStatus TakeHeader(Page& page, const RequestedPage& requested,
                        std::span<const std::byte> encoded, std::vector<bool>& covered);
  // Ends a page. Tiles that arrive later are ignored.
  void End(Page& page, PageStatus status);
  // Counts a tile that was written; ends the page with the last one, or if the checksum differs.
  void CountTile(Page& page, bool verified);
  // The place of tile `index` of the delivered part, and its checksum in the header.
  std::byte* Place(const TileBatch& batch, uint32_t index) const;
  uint32_t Sum(const TileBatch& batch, uint32_t index) const;

  FetchRequest request_;
  std::vector<Page> pages_;
  size_t responded_ = 0;   // pages [0, responded_) have a response
  size_t open_pages_ = 0;  // pages that are hits and wait for tiles
  absl::Status detail_;
};

}  // namespace crumb::transport
