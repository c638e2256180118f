// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "transport/incoming_fetch.h"

#include <algorithm>
#include <utility>

#include "common/crc32c.h"
#include "common/status_macros.h"

namespace crumb::transport {
namespace {

absl::Status MalformedFetch(const char* what) {
  return absl::DataLossError(std::string("malformed response: ") + what);
}

void FillStrides(RequestedPage& requested) {
  TilePlaces& places = requested.places;
  if (places.head_stride == 0) places.head_stride = requested.tile_bytes;
  if (places.layer_stride == 0) {
    places.layer_stride = places.head_stride * static_cast<size_t>(requested.range.heads.size());
  }
}

// The index of tile (layer, head) in the order of a range.
size_t IndexIn(const TileRange& range, int layer, int head) {
  return static_cast<size_t>(layer - range.layers.begin) * range.heads.size() +
         static_cast<size_t>(head - range.heads.begin);
}

int LayerOf(const TileRange& range, uint32_t index) {
  return range.layers.begin + static_cast<int>(index) / range.heads.size();
}
int HeadOf(const TileRange& range, uint32_t index) {
  return range.heads.begin + static_cast<int>(index) % range.heads.size();
}

// Marks the tiles of `part` in `covered`, which has one entry per tile of `whole`. Returns false if
// one of them was marked already.
bool Cover(const TileRange& whole, const TileRange& part, std::vector<bool>& covered) {
  for (int layer = part.layers.begin; layer < part.layers.end; ++layer) {
    for (int head = part.heads.begin; head < part.heads.end; ++head) {
      auto mark = covered[IndexIn(whole, layer, head)];
      if (mark) return false;
      mark = true;
    }
  }
  return true;
}

}  // namespace

absl::Status IncomingFetch::Check(const FetchRequest& request, size_t pages_max) {
  if (request.pages.empty() || request.pages.size() > pages_max) {
    return absl::InvalidArgumentError("a fetch has between 1 and " + std::to_string(pages_max) +
                                      " pages, not " + std::to_string(request.pages.size()));
  }
  for (const RequestedPage& requested : request.pages) {
    if (!IsTileRange(requested.range)) {
      return absl::InvalidArgumentError(
          "a requested page needs layers and heads, 65536 tiles at most");
    }
    if (requested.tile_bytes == 0 || requested.tile_bytes > kTileBytesMax ||
        requested.places.first == nullptr) {
      return absl::InvalidArgumentError(
          "a requested page needs tile_bytes of at most 1 MiB and places");
    }
    const TilePlaces& places = requested.places;
    if (places.head_stride != 0 && places.head_stride < requested.tile_bytes) {
      return absl::InvalidArgumentError("head_stride is shorter than a tile");
    }
  }
  return absl::OkStatus();
}

IncomingFetch::IncomingFetch(FetchRequest request)
    : request_(std::move(request)), pages_(request_.pages.size()) {
  for (RequestedPage& requested : request_.pages) FillStrides(requested);
}

FetchBody IncomingFetch::Body(TimePoint now) const {
  FetchBody body;
  body.session = request_.session;
  body.keyspace = request_.keyspace;
  body.generation = request_.generation;
  body.time_left_us = UINT64_MAX;
  if (request_.deadline != TimePoint::max()) {
    const auto left = std::max(request_.deadline - now, Duration::zero());
    body.time_left_us =
        static_cast<uint64_t>(std::chrono::duration_cast<std::chrono::microseconds>(left).count());
  }
  for (const RequestedPage& requested : request_.pages) {
    body.pages.push_back({requested.key, requested.range, requested.tile_bytes});
  }
  return body;
}

void IncomingFetch::End(Page& page, PageStatus status) {
  page.ended = true;
  page.status = status;
  if (status != PageStatus::kHit) page.fragments.clear();
}

PageStatus IncomingFetch::TakeHeader(Page& page, const RequestedPage& requested,
                                     std::span<const std::byte> encoded,
                                     std::vector<bool>& covered) {
  absl::StatusOr<FragmentHeader> header = DecodeFragmentHeader(encoded);
  if (!header.ok()) {
    detail_.Update(header.status());
    return PageStatus::kCorrupt;
  }
  if (header->keyspace != request_.keyspace || header->key != requested.key ||
      header->tile_bytes != requested.tile_bytes || header->page_tokens != kPageTokens) {
    detail_.Update(absl::DataLossError("the peer sent another page than the requested one"));
    return PageStatus::kCorrupt;
  }
  if (header->generation != request_.generation) return PageStatus::kStale;
  const TileRange delivered = Intersect(header->range, requested.range);
  if (delivered.tiles() == 0 || !Cover(requested.range, delivered, covered)) {
    detail_.Update(
        absl::DataLossError("the peer sent fragments that overlap or were not requested"));
    return PageStatus::kCorrupt;
  }
  page.tiles_left += static_cast<uint32_t>(delivered.tiles());
  page.fragments.push_back(
      {{*std::move(header), delivered}, std::vector<bool>(static_cast<size_t>(delivered.tiles()))});
  return PageStatus::kHit;
}

void IncomingFetch::TakePage(Page& page, const RequestedPage& requested,
                             const ResponseBody::Page& response) {
  if (response.status != PageStatus::kHit) return End(page, response.status);
  std::vector<bool> covered(static_cast<size_t>(requested.range.tiles()));
  for (const auto encoded : response.headers) {
    const PageStatus status = TakeHeader(page, requested, encoded, covered);
    if (status != PageStatus::kHit) return End(page, status);
  }
  if (page.tiles_left != covered.size()) return End(page, PageStatus::kNotCovered);
  ++open_pages_;
}

absl::Status IncomingFetch::TakeResponse(std::span<const std::byte> body) {
  CRUMB_ASSIGN_OR_RETURN(const ResponseBody response, DecodeResponse(body));
  if (response.first_page != responded_ || response.pages.size() > pages_.size() - responded_) {
    return MalformedFetch("not the pages that come next");
  }
  for (const ResponseBody::Page& page : response.pages) {
    TakePage(pages_[responded_], request_.pages[responded_], page);
    ++responded_;
  }
  return absl::OkStatus();
}

absl::StatusOr<std::optional<TileBatch>> IncomingFetch::Claim(const FrameHeader& header,
                                                              size_t bytes) {
  if (header.page >= responded_) return MalformedFetch("tiles of a page without a response");
  Page& page = pages_[header.page];
  if (page.ended && page.status != PageStatus::kHit) return std::optional<TileBatch>();
  if (header.fragment >= page.fragments.size()) return MalformedFetch("tiles of no fragment");
  std::vector<bool>& claimed = page.fragments[header.fragment].claimed;
  const TileBatch batch{header.page, header.fragment, header.first, header.count};
  if (batch.count == 0 || batch.first >= claimed.size() ||
      batch.count > claimed.size() - batch.first || bytes != BatchBytes(batch)) {
    return MalformedFetch("tiles outside of their fragment");
  }
  const auto begin = claimed.begin() + batch.first, end = begin + batch.count;
  if (std::find(begin, end, true) != end) return MalformedFetch("tiles came twice");
  std::fill(begin, end, true);
  return std::optional<TileBatch>(batch);
}

std::byte* IncomingFetch::Place(const TileBatch& batch, uint32_t index) const {
  const RequestedPage& requested = request_.pages[batch.page];
  const TileRange& delivered = pages_[batch.page].fragments[batch.fragment].what.delivered;
  const auto layer = static_cast<size_t>(LayerOf(delivered, index) - requested.range.layers.begin);
  const auto head = static_cast<size_t>(HeadOf(delivered, index) - requested.range.heads.begin);
  return requested.places.first + layer * requested.places.layer_stride +
         head * requested.places.head_stride;
}

uint32_t IncomingFetch::Sum(const TileBatch& batch, uint32_t index) const {
  const FetchedFragment& what = pages_[batch.page].fragments[batch.fragment].what;
  return what.header.tile_sums[IndexIn(what.header.range, LayerOf(what.delivered, index),
                                       HeadOf(what.delivered, index))];
}

void IncomingFetch::CountTile(Page& page, bool verified) {
  if (!verified) {
    detail_.Update(absl::DataLossError("the checksum of a tile differs after the transfer"));
    --open_pages_;
    return End(page, PageStatus::kCorrupt);
  }
  if (--page.tiles_left > 0) return;
  --open_pages_;
  End(page, PageStatus::kHit);
}

void IncomingFetch::Deliver(const TileBatch& batch, std::span<const std::byte> tiles) {
  Page& page = pages_[batch.page];
  const size_t tile_bytes = request_.pages[batch.page].tile_bytes;
  for (uint32_t i = 0; i < batch.count && !page.ended; ++i) {
    const uint32_t index = batch.first + i;
    const uint32_t sum = CopyCrc32c(Place(batch, index), tiles.subspan(i * tile_bytes, tile_bytes));
    CountTile(page, sum == Sum(batch, index));
  }
}

std::vector<std::span<std::byte>> IncomingFetch::Places(const TileBatch& batch) const {
  const size_t tile_bytes = request_.pages[batch.page].tile_bytes;
  std::vector<std::span<std::byte>> places;
  for (uint32_t i = 0; i < batch.count; ++i) {
    std::byte* place = Place(batch, batch.first + i);
    if (!places.empty() && places.back().data() + places.back().size() == place) {
      places.back() = {places.back().data(), places.back().size() + tile_bytes};
    } else {
      places.emplace_back(place, tile_bytes);
    }
  }
  return places;
}

void IncomingFetch::Land(const TileBatch& batch, const absl::Status& outcome) {
  Page& page = pages_[batch.page];
  if (page.ended) return;
  if (!outcome.ok()) {
    detail_.Update(outcome);
    --open_pages_;
    return End(page, PageStatus::kUnavailable);
  }
  const size_t tile_bytes = request_.pages[batch.page].tile_bytes;
  for (uint32_t i = 0; i < batch.count && !page.ended; ++i) {
    const uint32_t index = batch.first + i;
    CountTile(page, Crc32c({Place(batch, index), tile_bytes}) == Sum(batch, index));
  }
}

FetchResponse IncomingFetch::Finish(PageStatus rest, const absl::Status& detail) {
  FetchResponse response;
  response.detail = detail_.ok() ? detail : detail_;
  for (Page& page : pages_) {
    if (!page.ended) End(page, rest);
    PageResponse& out = response.pages.emplace_back();
    out.status = page.status;
    if (page.status != PageStatus::kHit) continue;
    for (Fragment& fragment : page.fragments) out.fragments.push_back(std::move(fragment.what));
  }
  responded_ = pages_.size();
  open_pages_ = 0;
  return response;
}

}  // namespace crumb::transport
