// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "transport/outgoing_response.h"

#include <algorithm>
#include <utility>

namespace crumb::transport {
namespace {

// Bytes of a kResponse frame beyond which the next page begins another frame.
constexpr size_t kResponseFrameBytes = 48 << 10;

ResponseBody::Page ResponsePage(const SourcePage& page) {
  ResponseBody::Page out{page.status, {}};
  for (const SourceFragment& fragment : page.fragments) out.headers.push_back(fragment.header());
  return out;
}

absl::Status CheckFragment(const SourceFragment& fragment) {
  if (!IsTileRange(fragment.range) || fragment.tile_bytes == 0 ||
      fragment.tile_bytes > kTileBytesMax ||
      fragment.bytes.size() != FragmentBytes(fragment.range.tiles(), fragment.tile_bytes)) {
    return absl::InternalError("the size of a fragment of the source does not fit its ranges");
  }
  return absl::OkStatus();
}

}  // namespace

OutgoingResponse::OutgoingResponse(const FetchBody& fetch, SourceResponse response,
                                   size_t frame_bytes)
    : wanted_(fetch.pages), response_(std::move(response)), frame_bytes_(frame_bytes) {
  for (size_t i = 0; i < std::min(response_.pages.size(), wanted_.size()); ++i) {
    for (const SourceFragment& fragment : response_.pages[i].fragments) {
      tile_bytes_total_ +=
          static_cast<uint64_t>(Intersect(fragment.range, wanted_[i].range).tiles()) *
          fragment.tile_bytes;
    }
  }
}

absl::Status OutgoingResponse::Check() const {
  if (response_.pages.size() != wanted_.size()) {
    return absl::InternalError("the source returned another number of pages than requested");
  }
  for (const SourcePage& page : response_.pages) {
    if ((page.status == PageStatus::kHit) != !page.fragments.empty() ||
        page.fragments.size() > UINT16_MAX) {
      return absl::InternalError(
          "a page of the source is neither a hit with fragments nor a miss without");
    }
    for (const SourceFragment& fragment : page.fragments) {
      if (absl::Status status = CheckFragment(fragment); !status.ok()) return status;
    }
    if (ResponsePageBytes(ResponsePage(page)) > kControlBodyMax - kResponseFrameBytes) {
      return absl::InternalError("a page of the source has more headers than fit into a frame");
    }
  }
  return absl::OkStatus();
}

bool OutgoingResponse::NextResponse(OutgoingFrame& frame) {
  if (responded_ == response_.pages.size()) return false;
  ResponseBody body;
  body.first_page = static_cast<uint32_t>(responded_);
  size_t bytes = 0;
  while (responded_ < response_.pages.size()) {
    const SourcePage& page = response_.pages[responded_];
    ResponseBody::Page out = ResponsePage(page);
    const size_t page_bytes = ResponsePageBytes(out);
    if (!body.pages.empty() && bytes + page_bytes > kResponseFrameBytes) break;
    bytes += page_bytes;
    body.pages.push_back(std::move(out));
    ++responded_;
  }
  frame.header.type = FrameType::kResponse;
  frame.body = EncodeResponse(body);
  return true;
}

void OutgoingResponse::AddTiles(const SourceFragment& fragment, const TileRange& part,
                                uint32_t first, uint32_t count, OutgoingFrame& frame) const {
  const std::span<const std::byte> tiles = fragment.tiles();
  const auto part_heads = static_cast<uint32_t>(part.heads.size());
  const auto all_heads = static_cast<size_t>(fragment.range.heads.size());
  for (uint32_t i = first; i < first + count;) {
    const uint32_t layer = i / part_heads, head = i % part_heads;
    const uint32_t adjacent = std::min(part_heads - head, first + count - i);
    const size_t index = (layer + part.layers.begin - fragment.range.layers.begin) * all_heads +
                         head + part.heads.begin - fragment.range.heads.begin;
    const auto piece =
        tiles.subspan(index * fragment.tile_bytes, adjacent * size_t{fragment.tile_bytes});
    if (!frame.tiles.empty() &&
        frame.tiles.back().data() + frame.tiles.back().size() == piece.data()) {
      frame.tiles.back() = {frame.tiles.back().data(), frame.tiles.back().size() + piece.size()};
    } else {
      frame.tiles.push_back(piece);
    }
    i += adjacent;
  }
}

bool OutgoingResponse::NextTiles(OutgoingFrame& frame) {
  for (; at_.page < response_.pages.size(); ++at_.page, at_.fragment = 0) {
    const SourcePage& page = response_.pages[at_.page];
    for (; at_.fragment < page.fragments.size(); ++at_.fragment, at_.tile = 0) {
      const SourceFragment& fragment = page.fragments[at_.fragment];
      const TileRange part = Intersect(fragment.range, wanted_[at_.page].range);
      const auto tiles = static_cast<uint32_t>(part.tiles());
      if (at_.tile >= tiles) continue;
      const auto most =
          std::max<uint32_t>(1, static_cast<uint32_t>(frame_bytes_ / fragment.tile_bytes));
      // Frames have about equal sizes, because a short last frame costs as much as a full one.
      const uint32_t frames = (tiles + most - 1) / most;
      const uint32_t count = std::min((tiles + frames - 1) / frames, tiles - at_.tile);
      frame.header.type = FrameType::kData;
      frame.header.page = static_cast<uint32_t>(at_.page);
      frame.header.fragment = static_cast<uint16_t>(at_.fragment);
      frame.header.first = at_.tile;
      frame.header.count = count;
      AddTiles(fragment, part, at_.tile, count, frame);
      at_.tile += count;
      return true;
    }
  }
  return false;
}

bool OutgoingResponse::Next(OutgoingFrame& frame) {
  return NextResponse(frame) || NextTiles(frame);
}

}  // namespace crumb::transport
