// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "client/device/prefix_loader.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "common/crc32c.h"
#include "common/logging.h"
#include "common/status_macros.h"

namespace crumb::client {

using kernels::PageFormat;

absl::Status PrefixLoad::MakeWait(DeviceStream stream, int layer) const {
  if (done_.load()) return absl::OkStatus();
  return device_.Wait(stream, lane_.layer_done[layer].get());
}

absl::Status PrefixLoad::MakeWaitAll(DeviceStream stream) const {
  if (done_.load()) return absl::OkStatus();
  return device_.Wait(stream, lane_.all_done.get());
}

int PrefixLoad::Settle() const {
  // The lane may become another load's meanwhile, which makes the wait longer, not shorter.
  absl::Status arrived;
  if (!done_.load()) arrived = device_.Synchronize(lane_.all_done.get());
  MutexLock lock(&mutex_);
  if (done_.load()) return damaged_;
  const auto* status = reinterpret_cast<const uint32_t*>(lane_.staging.get());
  for (size_t i = pages_.size(); i-- > 0;) {
    if (!arrived.ok() || status[i] != 0) damaged_ = pages_[i];
  }
  done_.store(true);
  return damaged_;
}

absl::StatusOr<std::unique_ptr<PrefixLoader>> PrefixLoader::Create(const Parts& parts, int loads,
                                                                   int pages_max) {
  std::unique_ptr<PrefixLoader> loader(new PrefixLoader(parts, pages_max));
  CRUMB_ASSIGN_OR_RETURN(loader->stream_, NewStream(parts.device));
  for (int i = 0; i < loads; ++i) {
    auto lane = std::make_unique<LoadLane>();
    for (int layer = 0; layer < parts.geometry.layers; ++layer) {
      CRUMB_ASSIGN_OR_RETURN(OwnedEvent event, NewEvent(parts.device));
      lane->layer_done.push_back(std::move(event));
    }
    CRUMB_ASSIGN_OR_RETURN(lane->all_done, NewEvent(parts.device));
    const size_t bytes = loader->TableBytes(pages_max);
    CRUMB_ASSIGN_OR_RETURN(lane->tables, NewDeviceBuffer(parts.device, bytes));
    CRUMB_ASSIGN_OR_RETURN(lane->staging, NewPinnedBuffer(parts.device, bytes));
    loader->GiveBack(lane.get());
    loader->lanes_.push_back(std::move(lane));
  }
  return loader;
}

LoadLane* PrefixLoader::TakeLane() {
  MutexLock lock(&mutex_);
  if (idle_.empty()) return nullptr;
  LoadLane* lane = idle_.back();
  idle_.pop_back();
  return lane;
}

void PrefixLoader::GiveBack(LoadLane* lane) {
  MutexLock lock(&mutex_);
  idle_.push_back(lane);
}

// Tables: status [pages] u32, then addresses [layers, pages] u64, then sums [layers, pages,
// kv_heads] u32.
size_t PrefixLoader::AddressesAt(int layer, int pages) const {
  return (sizeof(uint32_t) * pages + 7) / 8 * 8 + sizeof(uint64_t) * pages * layer;
}

size_t PrefixLoader::SumsAt(int layer, int pages) const {
  return AddressesAt(parts_.geometry.layers, pages) +
         sizeof(uint32_t) * pages * parts_.geometry.kv_heads * layer;
}

size_t PrefixLoader::TableBytes(int pages) const { return SumsAt(parts_.geometry.layers, pages); }

std::vector<std::shared_ptr<Page>> PrefixLoader::Take(const Keyspace& keyspace,
                                                      std::vector<std::shared_ptr<Page>> pages) {
  Pages missing;
  for (const std::shared_ptr<Page>& page : pages) {
    if (!page->placed && static_cast<int>(missing.size()) < pages_max_) missing.push_back(page);
  }
  absl::StatusOr<Pages> loaded = missing.empty() ? Pages() : Load(keyspace, missing);
  // No room is counted as a miss of its own reason.
  if (!loaded.ok() && !absl::IsResourceExhausted(loaded.status())) {
    LogWarning("a cached prefix was not loaded: {}", loaded.status().ToString());
  }
  size_t next = 0;
  for (size_t i = 0; i < pages.size(); ++i) {
    if (pages[i]->placed) continue;
    if (!loaded.ok() || next == loaded->size()) {
      pages.resize(i);
      break;
    }
    pages[i] = (*loaded)[next++];
  }
  return pages;
}

absl::StatusOr<PrefixLoader::Pages> PrefixLoader::Place(const Pages& from) {
  const bool sink = from.front()->position == 0;
  std::vector<std::shared_ptr<const ResidentSlot>> slots;
  if (sink) {
    CRUMB_ASSIGN_OR_RETURN(slots, parts_.sinks.Take(1, stream_.get()));
  }
  const int wanted = static_cast<int>(from.size()) - (sink ? 1 : 0);
  // Without room for a single page the sink alone is a hit.
  auto rest = parts_.pages.TakeSome(wanted, stream_.get(), parts_.slots_timeout);
  if (rest.ok()) slots.insert(slots.end(), rest->begin(), rest->end());
  Pages to;
  for (size_t i = 0; i < slots.size(); ++i) {
    auto page = parts_.geometry.NewPage(from[i]->format, slots[i]);
    page->key = from[i]->key;
    page->parent = from[i]->parent;
    page->position = from[i]->position;
    page->over_int2_prefix = from[i]->over_int2_prefix;
    page->tile_sums = from[i]->tile_sums;
    to.push_back(std::move(page));
  }
  return to;
}

absl::StatusOr<PrefixLoader::Pages> PrefixLoader::Load(const Keyspace& keyspace,
                                                       const Pages& from) {
  const Page& first = *from.front();
  // The verify kernel knows no tiles as large as BF16 ones: there is one such page, the host looks.
  if (first.format == PageFormat::kBf16) {
    for (int tile = 0; tile < parts_.geometry.tiles(); ++tile) {
      const std::byte* bytes = first.layer(tile / parts_.geometry.kv_heads) +
                               first.tile_bytes * (tile % parts_.geometry.kv_heads);
      if (Crc32c({bytes, first.tile_bytes}) != first.tile_sums[tile]) {
        parts_.damaged();
        return absl::DataLossError("a tile of the sink page is damaged");
      }
    }
  }
  const std::shared_ptr<const PinnedArena> arena = parts_.pinner.Use();
  LoadLane* lane = TakeLane();
  if (lane == nullptr) return absl::ResourceExhaustedError("too many loads are under way");
  absl::StatusOr<Pages> to = Pages{};
  std::shared_ptr<PrefixLoad> load;
  {
    MutexLock lock(&enqueue_mutex_);
    to = Place(from);
    if (to.ok() && !to->empty()) {
      std::vector<int> places;
      for (const std::shared_ptr<Page>& page : *to)
        places.push_back(static_cast<int>(page->position));
      load = std::make_shared<PrefixLoad>(parts_.device, *lane, std::move(places));
      for (const std::shared_ptr<Page>& page : *to) {
        static_cast<DevicePage&>(*page).load = load;
      }
      const absl::Status queued = Enqueue(*lane, *arena, from, *to);
      if (!queued.ok()) {
        // Part of it may be on its way to slots that are given back now.
        parts_.device.Record(lane->all_done.get(), stream_.get()).IgnoreError();
        parts_.device.Synchronize(lane->all_done.get()).IgnoreError();
        to = queued;
      }
    }
  }
  if (!to.ok() || to->empty()) {
    GiveBack(lane);
    return to;
  }
  SeeOff(load, arena, keyspace, from, *to);
  return to;
}

absl::Status PrefixLoader::Enqueue(LoadLane& lane, const PinnedArena& arena, const Pages& from,
                                   const Pages& to) {
  const int pages = static_cast<int>(to.size());
  const DeviceGeometry& g = parts_.geometry;
  std::byte* staging = lane.staging.get();
  std::memset(staging, 0, sizeof(uint32_t) * pages);
  for (int layer = 0; layer < g.layers; ++layer) {
    auto* addresses = reinterpret_cast<uint64_t*>(staging + AddressesAt(layer, pages));
    auto* sums = reinterpret_cast<uint32_t*>(staging + SumsAt(layer, pages));
    for (int i = 0; i < pages; ++i) {
      addresses[i] = reinterpret_cast<uint64_t>(to[i]->layer(layer));
      std::copy_n(to[i]->tile_sums.begin() + layer * g.kv_heads, g.kv_heads,
                  sums + int64_t{i} * g.kv_heads);
    }
  }
  const DeviceCopy tables{lane.tables.get(), reinterpret_cast<uint64_t>(staging),
                          TableBytes(pages)};
  CRUMB_RETURN_IF_ERROR(parts_.device.ToDevice({&tables, 1}, stream_.get()));
  for (int layer = 0; layer < g.layers; ++layer) {
    CRUMB_RETURN_IF_ERROR(EnqueueLayer(lane, arena, layer, from, to));
  }
  const DeviceCopy status{reinterpret_cast<uint64_t>(staging), lane.tables.get(),
                          sizeof(uint32_t) * pages};
  CRUMB_RETURN_IF_ERROR(parts_.device.ToHost({&status, 1}, stream_.get()));
  return parts_.device.Record(lane.all_done.get(), stream_.get());
}

absl::Status PrefixLoader::EnqueueLayer(LoadLane& lane, const PinnedArena& arena, int layer,
                                        const Pages& from, const Pages& to) {
  const DeviceGeometry& g = parts_.geometry;
  const int pages = static_cast<int>(to.size());
  std::vector<DeviceCopy> copies;
  copies.reserve(pages);
  for (int i = 0; i < pages; ++i) {
    copies.push_back({reinterpret_cast<uint64_t>(to[i]->layer(layer)),
                      reinterpret_cast<uint64_t>(from[i]->layer(layer)),
                      g.layer_stride(to[i]->format)});
  }
  CRUMB_RETURN_IF_ERROR(parts_.device.ToDevice(arena.CutToDevice(copies), stream_.get()));
  const int skip = to.front()->format == PageFormat::kBf16 ? 1 : 0;
  if (pages > skip) {
    kernels::cuda::VerifyParams params;
    params.tile_bytes = g.tile.int2_bytes();
    params.runs = pages - skip;
    params.tiles_per_run = g.kv_heads;
    params.run_address =
        reinterpret_cast<const uint64_t*>(lane.tables.get() + AddressesAt(layer, pages)) + skip;
    params.sums = reinterpret_cast<const uint32_t*>(lane.tables.get() + SumsAt(layer, pages)) +
                  skip * g.kv_heads;
    params.status = reinterpret_cast<uint32_t*>(lane.tables.get()) + skip;
    CRUMB_RETURN_IF_ERROR(parts_.device.kernels().Verify(params, stream_.get()));
  }
  return parts_.device.Record(lane.layer_done[layer].get(), stream_.get());
}

// Crumbd's memory is held until the copies are done, and so are the slots.
void PrefixLoader::SeeOff(const std::shared_ptr<PrefixLoad>& load,
                          std::shared_ptr<const PinnedArena> arena, const Keyspace& keyspace,
                          const Pages& from, const Pages& to) {
  parts_.background.Add([this, load, arena = std::move(arena), keyspace, from, to] {
    const int damaged = load->Settle();
    if (damaged >= 0) parts_.damaged();
    GiveBack(&load->lane_);
    std::vector<std::shared_ptr<const Page>> sound;
    for (const std::shared_ptr<Page>& page : to) {
      if (damaged >= 0 && static_cast<int>(page->position) >= damaged) break;
      sound.push_back(page);
    }
    parts_.loaded(keyspace, std::move(sound));
  });
}

}  // namespace crumb::client
