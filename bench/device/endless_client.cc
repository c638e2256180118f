// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "bench/device/endless_client.h"

#include <utility>

#include "common/crc32c.h"
#include "common/keyspace.h"
#include "kernels/fp16.h"

namespace crumb::bench {

using client::AcquireResult;
using client::CommitOutcome;
using client::KeyspaceInfo;
using client::StagingSlot;

namespace {

constexpr size_t kAlignment = 4096;
constexpr size_t kStagingSlots = 256;

size_t Rounded(size_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

std::byte* Aligned(std::byte* at) {
  return reinterpret_cast<std::byte*>(Rounded(reinterpret_cast<size_t>(at)));
}

}  // namespace

EndlessClient::EndlessClient(const client::WorkerOptions& options, int pages, uint32_t seed)
    : options_(options) {
  const kernels::TileShape shape = options.tile_shape();
  const size_t tiles = options.own_tiles().tiles();
  const size_t sink = Rounded(shape.bf16_bytes() * tiles);
  const size_t page = Rounded(shape.bytes(options.history_format) * tiles);
  memory_.resize(sink + page * pages + kAlignment);
  std::byte* begin = Aligned(memory_.data());
  std::mt19937_64 random(seed);
  sink_ = MakePage(begin, PageFormat::kBf16, random);
  for (int i = 0; i < pages; ++i) {
    pages_.push_back(MakePage(begin + sink + page * i, options.history_format, random));
  }
  staging_.resize(sink * 2 + (page + kAlignment) * kStagingSlots);
  mapped_->slabs.emplace_back(begin, sink + page * pages);
  std::byte* staging = Aligned(staging_.data());
  mapped_->staging = {staging, Rounded(staging_.size() - kAlignment) - kAlignment};
}

// Fills a page: codes are random, scales and minima small, and BF16 values near 1.
EndlessClient::StoredPage EndlessClient::MakePage(std::byte* at, PageFormat format,
                                                  std::mt19937_64& random) const {
  const kernels::TileShape shape = options_.tile_shape();
  const bool int2 = format == PageFormat::kInt2;
  const size_t tile_bytes = int2 ? shape.int2_bytes() : shape.bf16_bytes();
  const size_t codes = int2 ? 2 * shape.code_bytes() : 0;
  StoredPage page;
  page.header.format = format;
  page.header.layout_id = kernels::kTileLayoutId;
  page.header.tile_bytes = static_cast<uint32_t>(tile_bytes);
  page.header.range = options_.own_tiles();
  for (int tile = 0; tile < page.header.range.tiles(); ++tile, at += tile_bytes) {
    uint64_t drawn = 0;
    for (size_t i = 0; i < tile_bytes; i += 2) {
      drawn = i % 8 == 0 ? random() : drawn >> 16;
      const auto draw = static_cast<uint16_t>(drawn);
      const auto small = static_cast<uint16_t>((int2 ? 0x2000 : 0x3f00) + (draw & 0xff));
      const uint16_t value = i < codes ? static_cast<uint16_t>(draw) : small;
      at[i] = static_cast<std::byte>(value & 0xff);
      at[i + 1] = static_cast<std::byte>(value >> 8);
    }
    page.tile_sums.push_back(Crc32c({at, tile_bytes}));
  }
  const size_t bytes = tile_bytes * page.header.range.tiles();
  page.tiles = {at - bytes, bytes};
  return page;
}

absl::StatusOr<KeyspaceInfo> EndlessClient::OpenKeyspace(const client::KeyspaceSpec& spec,
                                                         Duration) {
  KeyspaceDescription description;
  for (const auto& [name, value] : spec.fields) {
    const absl::Status status = description.Set(name, value);
    if (!status.ok()) return status;
  }
  const kernels::TileShape shape = options_.tile_shape();
  KeyspaceInfo info;
  info.id = description.Id();
  info.generation = 1;
  info.state = client::KeyspaceState::kActive;
  info.int2_tile_bytes = static_cast<uint32_t>(shape.int2_bytes());
  info.bf16_tile_bytes = static_cast<uint32_t>(shape.bf16_bytes());
  info.epoch = 1;
  return info;
}

absl::StatusOr<AcquireResult> EndlessClient::Acquire(const client::AcquireRequest& request) {
  AcquireResult result;
  std::vector<client::LeasedFragment> fragments;
  fragments.reserve(request.keys.size());
  for (size_t i = 0; i < request.keys.size(); ++i) {
    const size_t position = request.first_page + i;
    const StoredPage& page = position == 0 ? sink_ : pages_[position % pages_.size()];
    fragments.push_back({static_cast<int>(i), page.header, page.tile_sums, page.tiles});
    result.page_tiers.push_back(client::Tier::kHost);
  }
  result.hit_pages = static_cast<int>(fragments.size());
  result.lease = std::make_shared<const client::Lease>(std::move(fragments), nullptr);
  return result;
}

absl::StatusOr<std::vector<StagingSlot>> EndlessClient::Reserve(int count, size_t fragment_bytes,
                                                                const client::PendingPages&,
                                                                Duration) {
  std::vector<StagingSlot> slots;
  const size_t rounded = Rounded(fragment_bytes);
  const size_t places = mapped_->staging.size() / rounded;
  for (int i = 0; i < count && static_cast<size_t>(i) < places; ++i) {
    const size_t offset = reserved_.fetch_add(1) % places * rounded;
    slots.emplace_back(mapped_->staging.subspan(offset, fragment_bytes), offset, nullptr);
  }
  return slots;
}

absl::StatusOr<std::vector<CommitOutcome>> EndlessClient::Commit(const KeyspaceId&,
                                                                 std::vector<StagingSlot> slots,
                                                                 size_t, Duration) {
  committed_.fetch_add(slots.size());
  return std::vector<CommitOutcome>(slots.size(), CommitOutcome::kStored);
}

absl::Status EndlessClient::SetKeyspaceState(const KeyspaceId&, client::KeyspaceState,
                                             const std::string&, const std::string&) {
  return absl::UnimplementedError("the endless client only serves workers");
}

absl::StatusOr<client::LookupResult> EndlessClient::Lookup(const KeyspaceId&,
                                                           std::span<const PageKey>) {
  return absl::UnimplementedError("the endless client only serves workers");
}

absl::StatusOr<uint64_t> EndlessClient::Flush(Duration) {
  return absl::UnimplementedError("the endless client only serves workers");
}

absl::StatusOr<client::MissReason> EndlessClient::Get(const KeyspaceId&, std::span<const PageKey>,
                                                      Duration, const client::FragmentReceiver&) {
  return absl::UnimplementedError("the endless client only serves workers");
}

absl::StatusOr<std::vector<CommitOutcome>> EndlessClient::Put(
    const KeyspaceId&, std::span<const client::FragmentBytes>, Duration) {
  return absl::UnimplementedError("the endless client only serves workers");
}

absl::StatusOr<uint32_t> EndlessClient::Prefetch(const KeyspaceId&, std::span<const PageKey>) {
  return absl::UnimplementedError("the endless client only serves workers");
}

absl::StatusOr<uint32_t> EndlessClient::Pin(const KeyspaceId&, std::span<const PageKey>, Duration) {
  return absl::UnimplementedError("the endless client only serves workers");
}

absl::StatusOr<uint32_t> EndlessClient::Unpin(const KeyspaceId&, std::span<const PageKey>) {
  return absl::UnimplementedError("the endless client only serves workers");
}

absl::StatusOr<uint32_t> EndlessClient::Delete(const KeyspaceId&, std::span<const PageKey>) {
  return absl::UnimplementedError("the endless client only serves workers");
}

absl::StatusOr<uint64_t> EndlessClient::DropKeyspace(const KeyspaceId&) {
  return absl::UnimplementedError("the endless client only serves workers");
}

absl::StatusOr<client::CacheStats> EndlessClient::Stats() {
  return absl::UnimplementedError("the endless client only serves workers");
}

absl::StatusOr<client::NodeList> EndlessClient::ListNodes() {
  return absl::UnimplementedError("the endless client only serves workers");
}

absl::StatusOr<client::PageLocation> EndlessClient::LocatePage(const KeyspaceId&, const PageKey&) {
  return absl::UnimplementedError("the endless client only serves workers");
}

absl::Status EndlessClient::DrainNode(const std::string&) {
  return absl::UnimplementedError("the endless client only serves workers");
}

}  // namespace crumb::bench
