// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "client/device/worker_pools.h"

#include <utility>

#include "client/aligned_bytes.h"
#include "client/device/device_page.h"
#include "common/status_macros.h"

namespace crumb::client {

using kernels::PageFormat;

absl::StatusOr<std::unique_ptr<WorkerPools>> WorkerPools::Open(const WorkerOptions& options,
                                                               const DeviceWorkerOptions& pools,
                                                               const DeviceGeometry& geometry,
                                                               Device& device, Client& client) {
  std::unique_ptr<WorkerPools> opened(new WorkerPools(options, geometry, pools.pool_write_through));
  CRUMB_ASSIGN_OR_RETURN(auto memory, device.OpenMemory());
  CRUMB_ASSIGN_OR_RETURN(opened->own_, opened->OpenPair(pools, std::move(memory), client, false));
  for (const int peer : pools.pool_peers) {
    CRUMB_ASSIGN_OR_RETURN(auto of_peer, device.OpenPeerMemory(peer));
    CRUMB_ASSIGN_OR_RETURN(Pair pair, opened->OpenPair(pools, std::move(of_peer), client, true));
    opened->peers_.push_back(std::move(pair));
  }
  return opened;
}

// Of a peer's pools this process maps what is there, gives no memory and takes no slot.
absl::StatusOr<WorkerPools::Pair> WorkerPools::OpenPair(const DeviceWorkerOptions& pools,
                                                        std::unique_ptr<DeviceMemory> memory,
                                                        Client& client, bool peer) const {
  Pair pair;
  pair.memory = std::move(memory);
  DevicePoolOptions options;
  options.handle_bytes = pools.pool_handle_bytes;
  options.slot_bytes = geometry_.page_bytes(PageFormat::kInt2);
  options.bytes_max = peer ? 0 : pools.pool_bytes;
  options.blank_slots = peer ? 0 : pools.pool_blank_pages;
  CRUMB_ASSIGN_OR_RETURN(pair.pages, DevicePool::Open(options, *pair.memory, client));
  options.slot_bytes = geometry_.page_bytes(PageFormat::kBf16);
  options.bytes_max = peer ? 0 : pools.pool_sink_bytes;
  options.blank_slots = peer ? 0 : pools.pool_blank_sinks;
  CRUMB_ASSIGN_OR_RETURN(pair.sinks, DevicePool::Open(options, *pair.memory, client));
  return pair;
}

void WorkerPools::NamePools(AcquireRequest* request) const {
  const auto add = [](const DevicePool& pool, std::vector<PoolId>* to) {
    const PoolId id = pool.id();
    if (id != PoolId()) to->push_back(id);
  };
  add(*own_.pages, &request->pools);
  add(*own_.sinks, &request->pools);
  for (const Pair& peer : peers_) {
    add(*peer.pages, &request->peers);
    add(*peer.sinks, &request->peers);
  }
}

absl::StatusOr<std::shared_ptr<Page>> WorkerPools::Hold(const DeviceFragment& fragment,
                                                        std::shared_ptr<const Lease> lease,
                                                        SlotPool& pages, SlotPool& sinks) const {
  const FragmentHeader& header = fragment.header;
  const bool sink = header.format == crumb::PageFormat::kBf16;
  DevicePool& own = sink ? *own_.sinks : *own_.pages;
  if (FragmentTilesBytes(header.range.tiles(), header.tile_bytes) > own.slot_bytes()) {
    return absl::DataLossError("a fragment is larger than the slot it lies in");
  }
  // Kernels know one distance between layers: that of this rank's heads.
  if (header.range.heads == options_.own_tiles().heads) {
    auto page = HoldOwn(fragment, lease, own, sink ? sinks : pages);
    if (!absl::IsNotFound(page.status())) return page;
  } else if (fragment.pool == own.id()) {
    return HoldForCopy(fragment, std::move(lease), own_, own);
  }
  for (const Pair& peer : peers_) {
    DevicePool& pool = sink ? *peer.sinks : *peer.pages;
    if (fragment.pool == pool.id()) return HoldForCopy(fragment, std::move(lease), peer, pool);
  }
  return absl::NotFoundError("a fragment lies in a pool that was joined anew");
}

absl::StatusOr<std::shared_ptr<Page>> WorkerPools::HoldOwn(const DeviceFragment& fragment,
                                                           std::shared_ptr<const Lease> lease,
                                                           DevicePool& pool,
                                                           SlotPool& slots) const {
  const auto format = static_cast<PageFormat>(fragment.header.format);
  CRUMB_ASSIGN_OR_RETURN(auto slot, pool.Hold(fragment, std::move(lease)));
  const int skipped = options_.own_tiles().layers.begin - fragment.header.range.layers.begin;
  const DeviceAddress address = slot->address() + geometry_.layer_stride(format) * skipped;
  auto page = geometry_.NewPage(format, slots.Adopt(std::move(slot), address));
  page->placed = true;
  page->over_int2_prefix = fragment.header.over_int2_prefix;
  return page;
}

absl::StatusOr<std::shared_ptr<Page>> WorkerPools::HoldForCopy(const DeviceFragment& fragment,
                                                               std::shared_ptr<const Lease> lease,
                                                               const Pair& pair,
                                                               DevicePool& pool) const {
  const FragmentHeader& header = fragment.header;
  const TileRange own = options_.own_tiles();
  const int heads = header.range.heads.size();
  if (static_cast<int>(header.tile_sums.size()) != header.range.tiles()) {
    return absl::NotFoundError("a fragment's sums were not sent: it cannot be copied");
  }
  CRUMB_ASSIGN_OR_RETURN(auto slot, pool.Hold(fragment, std::move(lease)));
  auto page = std::make_shared<Page>();
  page->format = static_cast<PageFormat>(header.format);
  page->tile_bytes = header.tile_bytes;
  page->layer_stride = page->tile_bytes * heads;
  page->bytes = FragmentTilesBytes(own.tiles(), header.tile_bytes);
  page->over_int2_prefix = header.over_int2_prefix;
  const auto tile_of = [&](int layer, int head) {
    return (layer - header.range.layers.begin) * heads + head - header.range.heads.begin;
  };
  for (int layer = own.layers.begin; layer < own.layers.end; ++layer) {
    for (int head = own.heads.begin; head < own.heads.end; ++head) {
      page->tile_sums.push_back(header.tile_sums[tile_of(layer, head)]);
    }
  }
  const size_t first = page->tile_bytes * tile_of(own.layers.begin, own.heads.begin);
  page->tiles = reinterpret_cast<std::byte*>(slot->address() + first);
  page->memory = std::const_pointer_cast<DeviceSlot>(slot);
  if (page->format == PageFormat::kInt2) return page;
  // No kernel checks a sink: it goes through host memory, where the loader does.
  const size_t bytes = page->layer_stride * own.layers.size();
  AlignedBytes copy = AllocateAligned(bytes);
  if (copy == nullptr) return absl::ResourceExhaustedError("no memory for a peer's sink page");
  const size_t before = page->tile_bytes * (own.heads.begin - header.range.heads.begin);
  CRUMB_RETURN_IF_ERROR(
      pair.memory->CopyToHost(slot->address() + first - before, std::span(copy.get(), bytes)));
  page->tiles = copy.get() + before;
  page->memory = std::shared_ptr<std::byte>(std::move(copy));
  return page;
}

bool WorkerPools::Has(const Page& page) const { return OnDevice(page).slot->shared != nullptr; }

absl::StatusOr<std::vector<CommitOutcome>> WorkerPools::Commit(
    const KeyspaceId& keyspace, std::span<const std::shared_ptr<const Page>> pages,
    std::span<const FragmentHeader> headers, Duration timeout) {
  std::vector<DevicePool::Fragment> fragments;
  for (size_t i = 0; i < pages.size(); ++i) {
    fragments.push_back({OnDevice(*pages[i]).slot->shared, headers[i]});
  }
  const bool sink = pages.front()->format == PageFormat::kBf16;
  return (sink ? own_.sinks : own_.pages)->Commit(keyspace, fragments, timeout);
}

}  // namespace crumb::client
