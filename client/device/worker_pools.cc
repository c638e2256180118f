// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "client/device/worker_pools.h"

#include <algorithm>
#include <utility>

#include "client/aligned_bytes.h"
#include "client/device/device_page.h"
#include "common/placement.h"
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

HeldPages WorkerPools::Hold(Fragments fragments, const std::shared_ptr<const Lease>& lease,
                            SlotPool& pages, SlotPool& sinks) const {
  HeldPages held;
  held.pages.reserve(fragments.size());
  while (held.status.ok() && held.pages.size() < fragments.size()) {
    const Fragments rest = fragments.subspan(held.pages.size());
    const FragmentHeader& first = rest.front()->header;
    const bool sink = first.format == crumb::PageFormat::kBf16;
    if (const size_t own = OwnRun(rest); own > 0) {
      held.status =
          HoldOwn(rest.first(own), lease, PoolOf(own_, first), sink ? sinks : pages, &held.pages);
      continue;
    }
    auto page = HoldElsewhere(*rest.front(), lease);
    held.status = page.status();
    if (page.ok()) held.pages.push_back(*std::move(page));
  }
  return held;
}

// How many of the first fragments lie in one of the own device's pools and are attended there, of
// one run at most. Kernels know one distance between layers: that of this rank's heads.
size_t WorkerPools::OwnRun(Fragments fragments) const {
  const FragmentHeader& first = fragments.front()->header;
  const DevicePool& pool = PoolOf(own_, first);
  const PoolId id = pool.id();
  const auto attended = [&](const DeviceFragment* fragment) {
    const FragmentHeader& header = fragment->header;
    return fragment->pool == id && header.format == first.format &&
           header.range.heads == options_.own_tiles().heads &&
           FragmentTilesBytes(header.range.tiles(), header.tile_bytes) <= pool.slot_bytes();
  };
  const Fragments run = fragments.first(std::min(fragments.size(), kRunPages));
  return static_cast<size_t>(std::find_if_not(run.begin(), run.end(), attended) - run.begin());
}

absl::Status WorkerPools::HoldOwn(Fragments fragments, const std::shared_ptr<const Lease>& lease,
                                  DevicePool& pool, SlotPool& slots,
                                  std::vector<std::shared_ptr<Page>>* held) const {
  CRUMB_ASSIGN_OR_RETURN(auto in_pool, pool.Hold(fragments, lease));
  const auto format = static_cast<PageFormat>(fragments.front()->header.format);
  std::vector<ResidentSlot> taken;
  taken.reserve(in_pool.size());
  for (size_t i = 0; i < in_pool.size(); ++i) {
    const int skipped = options_.own_tiles().layers.begin - fragments[i]->header.range.layers.begin;
    const DeviceAddress address = in_pool[i]->address() + geometry_.layer_stride(format) * skipped;
    taken.push_back({address, std::move(in_pool[i])});
  }
  SlotPool::Slots adopted = slots.Adopt(std::move(taken));
  RunOf<DevicePage> run;
  for (size_t i = 0; i < adopted.size(); ++i) {
    auto page = geometry_.NewPage(format, std::move(adopted[i]), run);
    page->placed = true;
    page->over_int2_prefix = fragments[i]->header.over_int2_prefix;
    held->push_back(std::move(page));
  }
  return absl::OkStatus();
}

// A page that has to be copied.
absl::StatusOr<std::shared_ptr<Page>> WorkerPools::HoldElsewhere(
    const DeviceFragment& fragment, const std::shared_ptr<const Lease>& lease) const {
  const FragmentHeader& header = fragment.header;
  DevicePool& own = PoolOf(own_, header);
  if (FragmentTilesBytes(header.range.tiles(), header.tile_bytes) > own.slot_bytes()) {
    return absl::DataLossError("a fragment is larger than the slot it lies in");
  }
  if (fragment.pool == own.id()) return HoldForCopy(fragment, lease, own_, own);
  for (const Pair& peer : peers_) {
    DevicePool& pool = PoolOf(peer, header);
    if (fragment.pool == pool.id()) return HoldForCopy(fragment, lease, peer, pool);
  }
  return absl::NotFoundError("a fragment lies in a pool that was joined anew");
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
  const DeviceFragment* const one = &fragment;
  CRUMB_ASSIGN_OR_RETURN(const auto held, pool.Hold({&one, 1}, std::move(lease)));
  const std::shared_ptr<const DeviceSlot>& slot = held.front();
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
