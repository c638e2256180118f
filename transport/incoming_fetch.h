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

// Tiles of one frame on their way into their places.
struct TileBatch {
  uint32_t page = 0;
  uint16_t fragment = 0;
  uint32_t first = 0;
  uint32_t count = 0;
};

// The requesting side of a fetch: takes the peer's frames, believes nothing, and puts verified
// tiles where they belong. Not thread-safe: of the progress thread.
class IncomingFetch {
 public:
  // kInvalidArgument naming what is wrong with a request.
  static absl::Status Check(const FetchRequest& request, size_t pages_max);

  explicit IncomingFetch(FetchRequest request);

  FetchBody Body(TimePoint now) const;

  // Takes the body of a kAnswer. kDataLoss: malformed, the connection cannot be trusted further.
  absl::Status TakeAnswer(std::span<const std::byte> body);

  // Claims the tiles that a kData announces with a body of `bytes`. Empty: its page is not wanted
  // (any more). kDataLoss: not what was answered, or claimed before.
  absl::StatusOr<std::optional<TileBatch>> Claim(const FrameHeader& header, size_t bytes);

  // Copies a claimed batch's tiles into their places, verifying them.
  void Deliver(const TileBatch& batch, std::span<const std::byte> tiles);

  // For a batch that somebody else writes: its places in order, neighbours joined; and then what
  // became of it, upon which it is verified in place.
  std::vector<std::span<std::byte>> Places(const TileBatch& batch) const;
  void Land(const TileBatch& batch, const absl::Status& outcome);

  // Every page has ended.
  bool complete() const { return answered_ == pages_.size() && open_pages_ == 0; }

  // Ends what has not ended as `rest` and gives the answer away. Call once; Land may follow.
  FetchAnswer Finish(PageStatus rest, const absl::Status& detail);

  const FetchRequest& request() const { return request_; }
  // Lets go of the destination's memory; nothing is written after.
  void DropMemory() { request_.memory.reset(); }
  size_t BatchBytes(const TileBatch& batch) const {
    return size_t{batch.count} * request_.pages[batch.page].tile_bytes;
  }

 private:
  struct Fragment {
    FetchedFragment what;
    std::vector<bool> claimed;  // by tile of what.delivered
  };
  struct Page {
    bool ended = false;
    PageStatus status = PageStatus::kUnavailable;
    std::vector<Fragment> fragments;
    uint32_t tiles_left = 0;
  };

  void TakePage(Page& page, const PageWish& wish, const AnswerBody::Page& answer);
  PageStatus TakeHeader(Page& page, const PageWish& wish, std::span<const std::byte> encoded,
                        std::vector<bool>& covered);
  void End(Page& page, PageStatus status);
  void CountTile(Page& page, bool verified);
  // The place of tile `index` of what is delivered, and its sum in the header.
  std::byte* Place(const TileBatch& batch, uint32_t index) const;
  uint32_t Sum(const TileBatch& batch, uint32_t index) const;

  FetchRequest request_;
  std::vector<Page> pages_;
  size_t answered_ = 0;    // pages [0, answered_) have an answer
  size_t open_pages_ = 0;  // of them, those whose tiles are not all there
  absl::Status detail_;
};

}  // namespace crumb::transport
