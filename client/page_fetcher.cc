// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "client/page_fetcher.h"

#include <cstring>
#include <utility>

#include "common/status_macros.h"

namespace crumb::client {
namespace {

// How long crumbd may take to answer from its memory alone.
constexpr Duration kHostOnlyTimeout = std::chrono::milliseconds(50);

}  // namespace

absl::StatusOr<FetchedPages> PageFetcher::Fetch(const KeyspaceBinding& keyspace, int first_page,
                                                const PageKey& parent, const PageKey& run,
                                                std::span<const PageKey> keys, int window_tokens,
                                                Duration timeout) const {
  AcquireRequest request;
  request.keyspace = keyspace.id;
  request.generation = keyspace.generation;
  request.keys = keys;
  request.first_page = static_cast<uint32_t>(first_page);
  request.run = run;
  request.range = TileRange{{0, static_cast<uint16_t>(options_.layers)},
                            {0, static_cast<uint16_t>(options_.kv_heads)}};
  request.window_tokens = static_cast<uint32_t>(window_tokens);
  request.wait_for_lower_tiers = timeout > Duration::zero();
  request.timeout = request.wait_for_lower_tiers ? timeout : kHostOnlyTimeout;
  request.verify_every = options_.verify_every;
  CRUMB_ASSIGN_OR_RETURN(AcquireResult acquired, client_.Acquire(request));

  FetchedPages fetched;
  fetched.miss_reason = acquired.miss_reason;
  if (acquired.lease == nullptr) return fetched;
  std::span<const LeasedFragment> rest = acquired.lease->fragments();
  for (int i = 0; i < acquired.hit_pages; ++i) {
    size_t count = 0;
    while (count < rest.size() && rest[count].page == i) ++count;
    const kernels::PageFormat format =
        first_page + i == 0 ? kernels::PageFormat::kBf16 : keyspace.history_format;
    auto page = Assemble(acquired.lease, rest.first(count), format);
    if (!page.ok()) {
      const bool full = absl::IsResourceExhausted(page.status());
      fetched.miss_reason = full ? MissReason::kBusy : MissReason::kCorrupt;
      if (!full) client_.Count({.verify_failures = 1});
      return fetched;
    }
    (*page)->key = keys[i];
    (*page)->parent = i == 0 ? parent : keys[i - 1];
    (*page)->position = static_cast<uint32_t>(first_page + i);
    fetched.bytes += (*page)->bytes;
    fetched.tiers.push_back(acquired.page_tiers[i]);
    fetched.pages.push_back(*std::move(page));
    rest = rest.subspan(count);
  }
  return fetched;
}

absl::StatusOr<std::shared_ptr<Page>> PageFetcher::Assemble(
    const std::shared_ptr<const Lease>& lease, std::span<const LeasedFragment> fragments,
    kernels::PageFormat format) const {
  auto page = std::make_shared<Page>();
  page->format = format;
  page->tile_bytes = options_.tile_shape().bytes(format);
  page->layer_bytes = page->tile_bytes * options_.kv_heads;
  page->bytes = page->layer_bytes * options_.layers;
  for (const LeasedFragment& fragment : fragments) {
    const bool fits = static_cast<int>(fragment.header.format) == static_cast<int>(format) &&
                      fragment.header.tile_bytes == page->tile_bytes &&
                      fragment.header.layout_id == kernels::kTileLayoutId;
    if (!fits) return absl::DataLossError("a fragment of another format");
    page->over_int2_prefix |= fragment.header.over_int2_prefix;
  }
  if (fragments.size() == 1 && fragments[0].tiles.size() == page->bytes) {
    // Pages are read only from here on; crumbd's slabs are mapped read-only besides.
    page->tiles = const_cast<std::byte*>(fragments[0].tiles.data());
    page->memory = std::const_pointer_cast<Lease>(lease);
    return page;
  }
  CRUMB_ASSIGN_OR_RETURN(std::shared_ptr<std::byte> memory, pool_.Allocate(page->bytes));
  for (const LeasedFragment& fragment : fragments) {
    CRUMB_RETURN_IF_ERROR(fragment.VerifyTiles());
    const TileRange& range = fragment.header.range;
    if (range.layers.end > options_.layers || range.heads.end > options_.kv_heads) {
      return absl::DataLossError("a fragment reaches beyond the model");
    }
    const size_t row = page->tile_bytes * range.heads.size();
    for (int layer = range.layers.begin; layer < range.layers.end; ++layer) {
      std::memcpy(memory.get() + page->layer_bytes * layer + page->tile_bytes * range.heads.begin,
                  fragment.tiles.data() + row * (layer - range.layers.begin), row);
    }
  }
  page->tiles = memory.get();
  page->memory = std::move(memory);
  return page;
}

}  // namespace crumb::client
