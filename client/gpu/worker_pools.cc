// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "client/gpu/worker_pools.h"

#include <algorithm>
#include <utility>

#include "client/gpu/device_page.h"
#include "client/worker/deferred_checksums.h"
#include "common/placement.h"
#include "common/status_macros.h"

namespace crumb::client {

using kernels::PageFormat;

absl::StatusOr<std::unique_ptr<WorkerPools>> WorkerPools::Open(const WorkerOptions& options,
                                                               const DeviceWorkerOptions& pools,
                                                               const DeviceGeometry& geometry,
                                                               Device& device, Client& client,
                                                               SlotPool& pages, SlotPool& sinks) {
  std::unique_ptr<WorkerPools> opened(new WorkerPools(options, geometry, pools, pages, sinks));
  CRUMB_ASSIGN_OR_RETURN(auto memory, device.OpenMemory());
  CRUMB_ASSIGN_OR_RETURN(opened->own_, opened->OpenPair(pools, std::move(memory), client, false));
  for (const int peer : pools.pool_peers) {
    CRUMB_ASSIGN_OR_RETURN(auto of_peer, device.OpenPeerMemory(peer));
    CRUMB_ASSIGN_OR_RETURN(Pair pair, opened->OpenPair(pools, std::move(of_peer), client, true));
    opened->peers_.push_back(std::move(pair));
  }
  return opened;
}

// Opens the pools of a device. In a peer's pools this process only maps handles; it adds no memory
// and reserves no slot.
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
  if (!request->peers.empty() && FirstSums() != options_.own_tiles()) {
    request->peer_sums = FirstSums();
  }
}

// Returns the tiles of the layers that are copied before all checksums have arrived.
TileRange WorkerPools::FirstSums() const {
  TileRange first = options_.own_tiles();
  first.layers.end =
      static_cast<uint16_t>(std::min<int>(first.layers.end, first.layers.begin + first_layers_));
  return first;
}

HeldPages WorkerPools::Hold(Fragments fragments, const std::shared_ptr<const Lease>& lease) {
  HeldPages held;
  held.pages.reserve(fragments.size());
  while (held.pages.size() < fragments.size()) {
    const Fragments rest = fragments.subspan(held.pages.size());
    const Fragments own = rest.first(OwnRun(rest));
    if (own.empty()) {
      held.status = HoldElsewhere(rest, lease, &held.pages);
      if (!held.status.ok()) return held;
      continue;
    }
    const PageFormat format = own.front()->shape->format;
    auto in_pool = PoolOf(own_, format).Hold(own, lease);
    held.status = in_pool.status();
    if (!held.status.ok()) return held;
    std::vector<SlotRef> taken;
    taken.reserve(own.size());
    for (size_t i = 0; i < own.size(); ++i) {
      const int skipped = options_.own_tiles().layers.begin - own[i]->shape->range.layers.begin;
      const DeviceAddress address =
          (*in_pool)[i]->address() + geometry_.layer_stride(format) * skipped;
      taken.push_back({address, std::move((*in_pool)[i])});
    }
    SlotPool& slots = format == PageFormat::kBf16 ? sink_slots_ : page_slots_;
    SlotPool::Slots adopted = slots.Adopt(std::move(taken));
    RunAllocator<DevicePage> run;
    for (size_t i = 0; i < adopted.size(); ++i) {
      auto page = geometry_.NewPage(format, std::move(adopted[i]), run);
      page->placed = true;
      page->over_int2_prefix = own[i]->shape->over_int2_prefix;
      held.pages.push_back(std::move(page));
    }
  }
  return held;
}

// Returns how many of the leading fragments lie in one of the own device's pools and can be
// attended in place, up to one page run. Kernels take one stride between layers: that of this
// rank's heads.
size_t WorkerPools::OwnRun(Fragments fragments) const {
  const FragmentHeader& first = *fragments.front()->shape;
  const DevicePool& pool = PoolOf(own_, first);
  const PoolId id = pool.id();
  const auto attended = [&](const DeviceFragment* fragment) {
    const FragmentHeader& header = *fragment->shape;
    return fragment->pool == id && header.format == first.format &&
           header.range.heads == options_.own_tiles().heads &&
           FragmentTilesBytes(header.range.tiles(), header.tile_bytes) <= pool.slot_bytes();
  };
  const Fragments run = fragments.first(std::min(fragments.size(), kRunPages));
  return static_cast<size_t>(std::find_if_not(run.begin(), run.end(), attended) - run.begin());
}

// Holds pages that have to be copied: the leading fragments that lie in one pool and have one
// shape, up to one page run.
absl::Status WorkerPools::HoldElsewhere(Fragments fragments,
                                        const std::shared_ptr<const Lease>& lease,
                                        std::vector<std::shared_ptr<Page>>* held) const {
  const DeviceFragment& first = *fragments.front();
  const FragmentHeader& shape = *first.shape;
  if (FragmentTilesBytes(shape.range.tiles(), shape.tile_bytes) >
      PoolOf(own_, shape).slot_bytes()) {
    return absl::DataLossError("a fragment is larger than the slot it lies in");
  }
  const Pair* pair = PoolOf(own_, shape).id() == first.pool ? &own_ : nullptr;
  for (const Pair& peer : peers_) {
    if (pair == nullptr && PoolOf(peer, shape).id() == first.pool) pair = &peer;
  }
  if (pair == nullptr)
    return absl::NotFoundError("a fragment lies in a pool whose connection has ended");
  const Fragments run = fragments.first(std::min(fragments.size(), kRunPages));
  const auto alike = [&](const DeviceFragment* fragment) {
    const auto sums = static_cast<int>(fragment->tile_sums.size());
    return fragment->pool == first.pool && fragment->shape == first.shape &&
           (sums == shape.range.tiles() || (sums > 0 && sums == FirstSums().tiles()));
  };
  const auto end = std::find_if_not(run.begin(), run.end(), alike);
  if (end == run.begin()) {
    return absl::NotFoundError("a fragment came without checksums and cannot be copied");
  }
  const Fragments copied(run.begin(), end);
  CRUMB_ASSIGN_OR_RETURN(const auto slots, PoolOf(*pair, shape).Hold(copied, lease));
  RunAllocator<Page> pages;
  for (size_t i = 0; i < copied.size(); ++i) {
    held->push_back(pages.New());
    FillForCopy(*copied[i], slots[i], *held->back());
  }
  return absl::OkStatus();
}

WorkerPools::PoolPage WorkerPools::PoolPageOf(const Page& page) {
  return {page.key, page.format, OnDevice(page).slot->shared->number()};
}

absl::StatusOr<std::vector<std::vector<uint32_t>>> WorkerPools::SumsOf(
    std::span<const PoolPage> places, Duration timeout) const {
  const TileRange own = options_.own_tiles();
  std::vector<std::vector<uint32_t>> sums(places.size());
  for (const PageFormat format : {PageFormat::kInt2, PageFormat::kBf16}) {
    std::vector<uint64_t> slots;
    std::vector<size_t> requested;
    for (size_t i = 0; i < places.size(); ++i) {
      if (places[i].format != format) continue;
      slots.push_back(places[i].slot);
      requested.push_back(i);
    }
    if (slots.empty()) continue;
    CRUMB_ASSIGN_OR_RETURN(const auto headers, PoolOf(own_, format).Headers(slots, timeout));
    for (size_t i = 0; i < requested.size(); ++i) {
      if (!headers[i].has_value() || headers[i]->key != places[requested[i]].key) continue;
      const TileRange& range = headers[i]->range;
      if (!range.layers.Contains(own.layers) || !range.heads.Contains(own.heads)) continue;
      sums[requested[i]] = OwnSums(headers[i]->range, headers[i]->tile_sums, own);
    }
  }
  return sums;
}

absl::Status WorkerPools::Withdraw(const PoolPage& place, Duration timeout) const {
  return PoolOf(own_, place.format).Withdraw({&place.slot, 1}, {&place.key, 1}, timeout);
}

void WorkerPools::FillForCopy(const DeviceFragment& fragment,
                              const std::shared_ptr<const DeviceSlot>& slot, Page& page) const {
  const FragmentHeader& shape = *fragment.shape;
  const TileRange own = options_.own_tiles(), range = shape.range;
  page.format = shape.format;
  page.tile_bytes = shape.tile_bytes;
  page.layer_stride = page.tile_bytes * range.heads.size();
  page.bytes = FragmentTilesBytes(own.tiles(), shape.tile_bytes);
  page.over_int2_prefix = shape.over_int2_prefix;
  page.in_pool = true;
  if (static_cast<int>(fragment.tile_sums.size()) == range.tiles()) {
    TakeSums(fragment, own, page);
  } else {
    page.fragment_sums = fragment.tile_sums;
  }
  const size_t before = page.layer_stride * (own.layers.begin - range.layers.begin) +
                        page.tile_bytes * (own.heads.begin - range.heads.begin);
  page.tiles = reinterpret_cast<std::byte*>(slot->address() + before);
  page.memory = std::const_pointer_cast<DeviceSlot>(slot);
}

bool WorkerPools::Has(const Page& page) const { return OnDevice(page).slot->shared != nullptr; }

// Commits pages. A page may be found damaged before other processes can see it.
absl::StatusOr<std::vector<CommitOutcome>> WorkerPools::Commit(
    const KeyspaceId& keyspace, std::span<const std::shared_ptr<const Page>> pages,
    std::span<const FragmentHeader> headers, Duration timeout) {
  std::vector<CommitOutcome> outcomes(pages.size(), CommitOutcome::kRefused);
  std::vector<DevicePool::Fragment> fragments;
  std::vector<size_t> sound;
  for (size_t i = 0; i < pages.size(); ++i) {
    if (OnDevice(*pages[i]).damaged.is_set()) continue;
    fragments.push_back({OnDevice(*pages[i]).slot->shared, headers[i]});
    sound.push_back(i);
  }
  CRUMB_ASSIGN_OR_RETURN(const auto committed,
                         PoolOf(own_, pages.front()->format).Commit(keyspace, fragments, timeout));
  for (size_t i = 0; i < sound.size(); ++i) outcomes[sound[i]] = committed[i];
  WithdrawDamaged(pages, timeout).IgnoreError();  // a scrubber reports it too
  return outcomes;
}

absl::Status WorkerPools::WithdrawDamaged(std::span<const std::shared_ptr<const Page>> pages,
                                          Duration timeout) const {
  for (const std::shared_ptr<const Page>& page : pages) {
    if (!OnDevice(*page).damaged.is_set()) continue;
    CRUMB_RETURN_IF_ERROR(Withdraw(PoolPageOf(*page), timeout));
  }
  return absl::OkStatus();
}

}  // namespace crumb::client
