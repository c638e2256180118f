// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "client/worker/page_fetcher.h"

#include <utility>

#include "client/worker/deferred_checksums.h"
#include "client/worker/page.h"
#include "common/crc32c.h"
#include "common/placement.h"
#include "common/status_macros.h"

namespace crumb::client {
namespace {

// Timeout for crumbd to respond from its memory alone.
constexpr Duration kHostOnlyTimeout = std::chrono::milliseconds(50);

bool Contains(const TileRange& outer, const TileRange& inner) {
  return outer.layers.Contains(inner.layers) && outer.heads.Contains(inner.heads);
}

// Removes and returns the fragments of page `page`, which come first in `rest`.
template <typename Fragment>
std::span<const Fragment> TakePage(int page, std::span<const Fragment>* rest) {
  size_t count = 0;
  while (count < rest->size() && (*rest)[count].page == page) ++count;
  const std::span<const Fragment> taken = rest->first(count);
  *rest = rest->subspan(count);
  return taken;
}

MissReason ReasonOf(const absl::Status& status) {
  if (absl::IsResourceExhausted(status)) return MissReason::kBusy;
  if (absl::IsNotFound(status)) return MissReason::kNotCovered;
  return absl::IsUnavailable(status) ? MissReason::kUnavailable : MissReason::kCorrupt;
}

// Returns the index of the tile of a layer and head in a fragment of `range`.
size_t TileIndex(const TileRange& range, int layer, int head) {
  return static_cast<size_t>(layer - range.layers.begin) * range.heads.size() +
         (head - range.heads.begin);
}

// Sets the checksums of the tiles `own`, which the fragment has.
void TakeSums(const LeasedFragment& fragment, const TileRange& own, Page& page) {
  const TileRange& range = fragment.header.range;
  if (range == own) {
    page.fragment_sums = fragment.tile_sums;
    return;
  }
  page.tile_sums.reserve(own.tiles());
  for (int layer = own.layers.begin; layer < own.layers.end; ++layer) {
    const auto of_layer =
        fragment.tile_sums.subspan(TileIndex(range, layer, own.heads.begin), own.heads.size());
    page.tile_sums.insert(page.tile_sums.end(), of_layer.begin(), of_layer.end());
  }
}

kernels::PageFormat FormatOf(const PageRequest& request, int index) {
  return request.first_page + index == 0 ? kernels::PageFormat::kBf16
                                         : request.keyspace->history_format;
}

// Copies the tiles of `own` that the fragment has to `page`. kDataLoss: a copy's checksum differs.
absl::Status CopyTiles(const LeasedFragment& fragment, const TileRange& own, Page& page) {
  const TileRange& range = fragment.header.range;
  const TileRange part = Intersect(range, own);
  for (int layer = part.layers.begin; layer < part.layers.end; ++layer) {
    for (int head = part.heads.begin; head < part.heads.end; ++head) {
      const size_t tile = TileIndex(range, layer, head);
      std::byte* to =
          page.layer(layer - own.layers.begin) + page.tile_bytes * (head - own.heads.begin);
      const uint32_t sum =
          CopyCrc32c(to, fragment.tiles.subspan(tile * page.tile_bytes, page.tile_bytes));
      if (sum != fragment.tile_sums[tile]) {
        return absl::DataLossError("a tile's checksum differs");
      }
      page.tile_sums[TileIndex(own, layer, head)] = sum;
    }
  }
  return absl::OkStatus();
}

}  // namespace

PageFetcher::PendingFetch PageFetcher::Start(const PageRequest& request) const {
  AcquireRequest wanted;
  wanted.keyspace = request.keyspace->id;
  wanted.generation = request.keyspace->generation;
  wanted.keys = request.keys;
  wanted.first_page = static_cast<uint32_t>(request.first_page);
  wanted.run = request.prompt_keys[request.first_page / kRunPages * kRunPages];
  wanted.range = request.whole_pages ? options_.all_tiles() : options_.own_tiles();
  wanted.window_tokens = static_cast<uint32_t>(request.window_tokens);
  wanted.wait_for_lower_tiers = request.timeout > Duration::zero();
  wanted.timeout = wanted.wait_for_lower_tiers ? request.timeout : kHostOnlyTimeout;
  wanted.lease = request.lease;
  wanted.lease_epoch = request.lease_epoch;
  wanted.verify_every = options_.verify_every;
  wanted.behind_miss = request.behind_miss;
  if (shared_ != nullptr) shared_->NamePools(&wanted);
  if (!wanted.pools.empty()) wanted.own = options_.own_tiles();
  auto pending = client_.StartAcquire(wanted);
  return {request, std::move(wanted), std::move(pending)};
}

bool PageFetcher::PendingFetch::Await() {
  if (pending_ != nullptr) result_ = std::exchange(pending_, nullptr)->Finish();
  return result_.ok() && static_cast<size_t>(result_->hit_pages) == request_.keys.size();
}

bool PageFetcher::PendingFetch::HasCopies() const {
  if (!result_.ok() || result_->lease == nullptr) return false;
  const std::span<const DeviceFragment> on_device = result_->lease->device_fragments();
  return !result_->lease->fragments().empty() ||
         (!on_device.empty() && !on_device.back().tile_sums.empty());
}

absl::StatusOr<FetchedPages> PageFetcher::Finish(PendingFetch pending) const {
  pending.Await();
  CRUMB_ASSIGN_OR_RETURN(const AcquireResult acquired, std::move(pending.result_));
  const PageRequest& request = pending.request_;
  FetchedPages fetched;
  fetched.miss_reason = acquired.miss_reason;
  if (acquired.lease == nullptr) return fetched;
  fetched.lease = acquired.lease;
  fetched.lease_id = acquired.lease_id;
  HeldPages held = HoldOnDevice(request, acquired.lease);
  DeferChecksums(pending, acquired, held.pages);
  auto next_held = held.pages.begin();
  std::span<const LeasedFragment> rest = acquired.lease->fragments();
  std::span<const DeviceFragment> on_device = acquired.lease->device_fragments();
  RunAllocator<Page> in_memory;
  fetched.pages.reserve(acquired.hit_pages);
  fetched.page_tiers.reserve(acquired.hit_pages);
  for (int i = 0; i < acquired.hit_pages; ++i) {
    const std::span<const LeasedFragment> fragments = TakePage(i, &rest);
    const bool in_pools = !TakePage(i, &on_device).empty();
    if (i >= request.skip) {
      std::shared_ptr<Page> page;
      absl::Status status;
      if (!in_pools) {
        page = in_memory.New();
        status = Assemble(acquired.lease, fragments, FormatOf(request, i), *page);
      } else if (next_held != held.pages.end()) {
        page = std::move(*next_held++);
      } else {
        status = held.status;
      }
      if (!status.ok()) {
        fetched.miss_reason = ReasonOf(status);
        if (fetched.miss_reason == MissReason::kCorrupt) client_.Count({.verify_failures = 1});
        return fetched;
      }
      page->key = request.keys[i];
      page->generation = request.keyspace->generation;
      page->parent = request.ParentOf(i);
      page->position = static_cast<uint32_t>(request.first_page + i);
      fetched.bytes += page->bytes;
      fetched.pages.push_back(std::move(page));
    }
    fetched.page_tiers.push_back(acquired.page_tiers[i]);
  }
  return fetched;
}

// Gives pages that have the checksums of some tiles only an object that fetches the others.
void PageFetcher::DeferChecksums(const PendingFetch& pending, const AcquireResult& acquired,
                                 std::span<const std::shared_ptr<Page>> pages) const {
  const TileRange own = options_.own_tiles();
  std::shared_ptr<DeferredChecksums> late;
  for (const std::shared_ptr<Page>& page : pages) {
    if (page->placed || page->sums().size() == static_cast<size_t>(own.tiles())) continue;
    if (late == nullptr) {
      late = std::make_shared<DeferredChecksums>(client_, pending.sent_, acquired.lease,
                                                 acquired.lease_id, own);
    }
    page->deferred_checksums = late;
  }
}

absl::Status PageFetcher::Assemble(const std::shared_ptr<const Lease>& lease,
                                   std::span<const LeasedFragment> fragments,
                                   kernels::PageFormat format, Page& page) const {
  page.format = format;
  page.tile_bytes = options_.tile_shape().bytes(format);
  const TileRange own = options_.own_tiles();
  page.bytes = FragmentTilesBytes(own.tiles(), page.tile_bytes);
  for (const LeasedFragment& fragment : fragments) {
    CRUMB_RETURN_IF_ERROR(CheckFits(fragment.header, format));
    page.over_int2_prefix |= fragment.header.over_int2_prefix;
  }
  for (const LeasedFragment& fragment : fragments) {
    const TileRange& range = fragment.header.range;
    if (!Contains(range, own)) continue;
    page.layer_stride = page.tile_bytes * range.heads.size();
    // Pages are read-only from here on, and crumbd's slabs are mapped read-only.
    page.tiles = const_cast<std::byte*>(fragment.tiles.data()) +
                 TileIndex(range, own.layers.begin, own.heads.begin) * page.tile_bytes;
    page.memory = std::const_pointer_cast<Lease>(lease);
    TakeSums(fragment, own, page);
    return absl::OkStatus();
  }
  CRUMB_ASSIGN_OR_RETURN(std::shared_ptr<std::byte> memory, pool_.Allocate(page.bytes));
  page.layer_stride = page.tile_bytes * own.heads.size();
  page.tiles = memory.get();
  page.memory = std::move(memory);
  page.tile_sums.resize(own.tiles());
  int copied = 0;
  for (const LeasedFragment& fragment : fragments) {
    CRUMB_RETURN_IF_ERROR(CopyTiles(fragment, own, page));
    copied += Intersect(fragment.header.range, own).tiles();
  }
  if (copied != own.tiles()) return absl::DataLossError("fragments that leave tiles out");
  return absl::OkStatus();
}

// Holds the request's pages in device pools, except those that it skips. Does not assemble a page
// from several fragments: ranks that use the same device's pools have the same degree of
// parallelism, and thus equal fragments.
HeldPages PageFetcher::HoldOnDevice(const PageRequest& request,
                                    const std::shared_ptr<const Lease>& lease) const {
  const TileRange own = options_.own_tiles();
  absl::Status missing;  // why the page behind `chosen` cannot be held
  std::span<const DeviceFragment> rest = lease->device_fragments();
  std::vector<const DeviceFragment*> chosen;
  chosen.reserve(rest.size());
  while (!rest.empty() && missing.ok()) {
    const int page = rest.front().page;
    const auto fragments = TakePage(page, &rest);
    if (page < request.skip) continue;
    const DeviceFragment* whole = nullptr;  // has all of this rank's tiles
    for (const DeviceFragment& fragment : fragments) {
      missing = CheckFits(*fragment.shape, FormatOf(request, page));
      if (missing.ok() && Contains(fragment.shape->range, own)) whole = &fragment;
      if (!missing.ok() || whole != nullptr) break;
    }
    if (whole != nullptr) {
      chosen.push_back(whole);
    } else if (missing.ok()) {
      missing = absl::NotFoundError("no fragment in a device pool holds all of this rank's part");
    }
  }
  if (chosen.empty()) return {{}, missing};
  if (shared_ == nullptr) {
    return {{}, absl::NotFoundError("this worker takes part in no device pool")};
  }
  HeldPages held = shared_->Hold(chosen, lease);
  if (held.status.ok()) held.status = missing;
  return held;
}

absl::Status PageFetcher::CheckFits(const FragmentHeader& header,
                                    kernels::PageFormat format) const {
  if (header.format != format || header.tile_bytes != options_.tile_shape().bytes(format) ||
      header.layout_id != kernels::kTileLayoutId) {
    return absl::DataLossError("a fragment of another format");
  }
  if (!Contains(options_.all_tiles(), header.range)) {
    return absl::DataLossError("a fragment reaches beyond the model");
  }
  return absl::OkStatus();
}

}  // namespace crumb::client
