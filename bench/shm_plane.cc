// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "bench/shm_plane.h"

#include <cstring>
#include <utility>

#include "bench/touch.h"
#include "common/crc32c.h"
#include "common/status_macros.h"
#include "fmt/format.h"

namespace crumb::bench {
namespace {

constexpr Duration kCallTimeout = std::chrono::seconds(10);
constexpr Duration kHostTimeout = std::chrono::seconds(1);

}  // namespace

ShmPlane::ShmPlane(client::Client& client, const FragmentSet& fragments)
    : client_(client), fragments_(fragments), copy_(fragments.tiles_bytes()) {}

std::vector<PageKey> ShmPlane::Keys(size_t first, size_t count) const {
  std::vector<PageKey> keys;
  for (size_t page = first; page < first + count; ++page) keys.push_back(fragments_.Key(page));
  return keys;
}

absl::Status ShmPlane::Put(size_t first, size_t count) {
  CRUMB_ASSIGN_OR_RETURN(auto slots, client_.Reserve(static_cast<int>(count),
                                                     fragments_.fragment_bytes(), kCallTimeout));
  if (slots.size() != count) return absl::ResourceExhaustedError("staging memory is full");
  for (size_t i = 0; i < count; ++i) {
    const std::span<const std::byte> tiles = fragments_.Tiles(first + i);
    std::memcpy(slots[i].bytes().data(), tiles.data(), tiles.size());
    EncodeFragmentHeader(fragments_.Header(first + i), slots[i].bytes().subspan(tiles.size()));
  }
  CRUMB_ASSIGN_OR_RETURN(const auto outcomes,
                         client_.Commit(fragments_.keyspace(), std::move(slots),
                                        fragments_.tiles_bytes(), kCallTimeout));
  for (const client::CommitOutcome outcome : outcomes) {
    if (outcome != client::CommitOutcome::kStored &&
        outcome != client::CommitOutcome::kDeduplicated) {
      return absl::ResourceExhaustedError(
          fmt::format("a page was not stored: outcome {}", static_cast<int>(outcome)));
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<std::shared_ptr<const client::Lease>> ShmPlane::LeasePages(
    size_t first, std::span<const PageKey> keys, Duration wait) {
  client::AcquireRequest request;
  request.keyspace = fragments_.keyspace();
  request.generation = fragments_.generation();
  request.keys = keys;
  request.wait_for_lower_tiers = wait > Duration::zero();
  request.timeout = wait > Duration::zero() ? wait : kHostTimeout;
  CRUMB_ASSIGN_OR_RETURN(const client::AcquireResult result, client_.Acquire(request));
  if (static_cast<size_t>(result.hit_pages) == keys.size()) return result.lease;
  return absl::NotFoundError(fmt::format("{} of {} pages from number {} are hits: {}",
                                         result.hit_pages, keys.size(), first,
                                         client::MissReasonName(result.miss_reason)));
}

absl::StatusOr<Duration> ShmPlane::Acquire(size_t first, std::span<const PageKey> keys,
                                           Duration wait) {
  const TimePoint begin = Clock::Real().Now();
  CRUMB_ASSIGN_OR_RETURN(const auto lease, LeasePages(first, keys, wait));
  KeepResult(static_cast<uint64_t>(lease->fragments().back().tiles.front()));
  return Clock::Real().Now() - begin;
}

absl::Status ShmPlane::Get(size_t first, size_t count) {
  CRUMB_ASSIGN_OR_RETURN(const auto lease, LeasePages(first, Keys(first, count), Duration::zero()));
  uint64_t sum = 0;
  for (const client::LeasedFragment& fragment : lease->fragments())
    sum += TouchBytes(fragment.tiles);
  KeepResult(sum);
  return absl::OkStatus();
}

absl::Status ShmPlane::GetCopy(size_t first, size_t count) {
  CRUMB_ASSIGN_OR_RETURN(const auto lease, LeasePages(first, Keys(first, count), Duration::zero()));
  for (const client::LeasedFragment& fragment : lease->fragments()) {
    const size_t tile_bytes = fragment.header.tile_bytes;
    for (size_t i = 0; i < fragment.tile_sums.size(); ++i) {
      const std::span<const std::byte> tile = fragment.tiles.subspan(i * tile_bytes, tile_bytes);
      if (CopyCrc32c(copy_.data() + i * tile_bytes, tile) != fragment.tile_sums[i]) {
        return absl::DataLossError("a copied tile's checksum differs");
      }
    }
  }
  return absl::OkStatus();
}

}  // namespace crumb::bench
