// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "client/worker/deferred_checksums.h"

#include <algorithm>
#include <utility>

namespace crumb::client {
namespace {

// Minimum timeout of the request if little is left of the first one's: the pages are a hit already,
// and crumbd responds from memory.
constexpr Duration kTimeoutMin = std::chrono::milliseconds(200);

}  // namespace

DeferredChecksums::DeferredChecksums(Client& client, const AcquireRequest& request,
                                     std::shared_ptr<const Lease> lease, uint64_t lease_id,
                                     const TileRange& own)
    : client_(client),
      keys_(request.keys.begin(), request.keys.end()),
      request_(request),
      lease_(std::move(lease)),
      own_(own),
      full_lease_(nullptr) {
  request_.keys = keys_;
  request_.lease = lease_id;
  request_.peer_sums.reset();
  request_.window_tokens = 0;
  request_.timeout = std::max(request_.timeout, kTimeoutMin);
}

absl::Status DeferredChecksums::Await() {
  if (!full_lease_.ok() || *full_lease_ != nullptr) return full_lease_.status();
  absl::StatusOr<AcquireResult> acquired = client_.Acquire(request_);
  if (!acquired.ok()) {
    full_lease_ = acquired.status();
  } else if (acquired->lease == nullptr) {
    full_lease_ =
        absl::NotFoundError("crumbd does not have the lease of the requested checksums any more");
  } else {
    full_lease_ = std::move(acquired->lease);
  }
  return full_lease_.status();
}

bool DeferredChecksums::Fill(int index, Page& page) const {
  if (!full_lease_.ok() || *full_lease_ == nullptr) return false;
  const std::span<const DeviceFragment> fragments = (*full_lease_)->device_fragments();
  const auto first = std::lower_bound(
      fragments.begin(), fragments.end(), index,
      [](const DeviceFragment& fragment, int wanted) { return fragment.page < wanted; });
  for (auto at = first; at != fragments.end() && at->page == index; ++at) {
    const TileRange& range = at->shape->range;
    if (Intersect(range, own_) != own_) continue;
    if (static_cast<int>(at->tile_sums.size()) != range.tiles()) return false;
    TakeSums(*at, own_, page);
    return true;
  }
  return false;
}

std::vector<uint32_t> OwnSums(const TileRange& range, std::span<const uint32_t> sums,
                              const TileRange& own) {
  std::vector<uint32_t> taken;
  taken.reserve(static_cast<size_t>(own.tiles()));
  for (int layer = own.layers.begin; layer < own.layers.end; ++layer) {
    const size_t first = static_cast<size_t>(layer - range.layers.begin) * range.heads.size() +
                         (own.heads.begin - range.heads.begin);
    const auto of_layer = sums.subspan(first, own.heads.size());
    taken.insert(taken.end(), of_layer.begin(), of_layer.end());
  }
  return taken;
}

void TakeSums(const DeviceFragment& fragment, const TileRange& own, Page& page) {
  const TileRange& range = fragment.shape->range;
  if (range == own) {
    page.fragment_sums = fragment.tile_sums;
    return;
  }
  page.fragment_sums = {};
  page.tile_sums = OwnSums(range, fragment.tile_sums, own);
}

}  // namespace crumb::client
