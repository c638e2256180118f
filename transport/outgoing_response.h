// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "transport/fragment_source.h"
#include "transport/frame.h"

namespace crumb::transport {

// A frame that is to be sent. A control frame owns its body; tiles are sent from their place.
struct OutgoingFrame {
  FrameHeader header;
  std::vector<std::byte> body;
  std::vector<std::span<const std::byte>> tiles;
};

// The serving side of a fetch: it cuts the leased fragments into frames, first the response and
// then the tiles. Not thread-safe; belongs to the progress thread.
//
// Tiles are not checksummed again: the checksums in the slots' headers pass from end to end.
class OutgoingResponse {
 public:
  // `frame_bytes` bounds the tiles of one frame; a larger tile has a frame of its own.
  OutgoingResponse(const FetchBody& fetch, SourceResponse response, size_t frame_bytes);

  // Returns kInternal if the source violated its contract; no frame may be sent then.
  absl::Status Check() const;

  // Makes the next frame, except its connection, fetch and checksum. Returns false after the last.
  bool Next(OutgoingFrame& frame);

  // Returns whether all remaining frames are tiles.
  bool responded() const { return responded_ == response_.pages.size(); }
  // Returns the bytes of all tiles that the response sends.
  uint64_t tile_bytes_total() const { return tile_bytes_total_; }
  const SourceResponse& response() const { return response_; }

 private:
  // The next tile to be sent.
  struct Cursor {
    size_t page = 0;
    size_t fragment = 0;
    uint32_t tile = 0;
  };

  // Makes the next kResponse frame, of as many pages as fit into 48 KiB of headers, or the next
  // kData frame. Return false if there is none left.
  bool NextResponse(OutgoingFrame& frame);
  bool NextTiles(OutgoingFrame& frame);
  // Adds `count` tiles of the part to the frame, with adjacent ones joined.
  void AddTiles(const SourceFragment& fragment, const TileRange& part, uint32_t first,
                uint32_t count, OutgoingFrame& frame) const;

  const std::vector<FetchBody::Page> wanted_;
  SourceResponse response_;
  const size_t frame_bytes_;
  uint64_t tile_bytes_total_ = 0;
  size_t responded_ = 0;
  Cursor at_;
};

}  // namespace crumb::transport
