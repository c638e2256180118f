// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "client/device/prefix_loader.h"

#include <algorithm>
#include <iterator>
#include <utility>

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
                                                                   int pages_max, int blocks) {
  std::unique_ptr<PrefixLoader> loader(
      new PrefixLoader(parts, pages_max, parts.device.kernels_read_pinned() ? blocks : 0));
  CRUMB_ASSIGN_OR_RETURN(loader->stream_, NewUrgentStream(parts.device));
  for (int i = 0; i < loads; ++i) {
    auto lane = std::make_unique<LoadLane>();
    for (int layer = 0; layer < parts.geometry.layers; ++layer) {
      CRUMB_ASSIGN_OR_RETURN(OwnedEvent event, NewEvent(parts.device));
      lane->layer_done.push_back(std::move(event));
    }
    CRUMB_ASSIGN_OR_RETURN(lane->all_done, NewEvent(parts.device));
    const size_t bytes = loader->TablesAt(0, pages_max).bytes;
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

PrefixLoader::Tables PrefixLoader::TablesAt(uint64_t base, int pages) const {
  uint64_t at = base;
  const auto next = [&at]<typename T>(T** array, size_t count) {
    *array = reinterpret_cast<T*>(at);
    at += (sizeof(T) * count + 15) / 16 * 16;
  };
  Tables tables;
  next(&tables.status, pages);
  next(&tables.from, pages);
  next(&tables.to, pages);
  next(&tables.from_stride, pages);
  next(&tables.sums, size_t{1} * pages * parts_.geometry.tiles());
  tables.bytes = at - base;
  return tables;
}

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
  to.reserve(slots.size());
  for (size_t i = 0; i < slots.size(); ++i) {
    auto page = parts_.geometry.NewPage(from[i]->format, slots[i]);
    page->key = from[i]->key;
    page->parent = from[i]->parent;
    page->position = from[i]->position;
    page->over_int2_prefix = from[i]->over_int2_prefix;
    page->tile_sums = std::move(from[i]->tile_sums);
    to.push_back(std::move(page));
  }
  return to;
}

absl::StatusOr<PrefixLoader::Pages> PrefixLoader::Load(const Keyspace& keyspace,
                                                       const Pages& from) {
  std::shared_ptr<const PinnedArena> arena = parts_.pinner.Use();
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
      const absl::Status queued = Enqueue(MakeJob(*lane, *arena, from, *to));
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
  SeeOff(load, std::move(arena), keyspace, from, *to);
  return to;
}

PrefixLoader::Job PrefixLoader::MakeJob(LoadLane& lane, const PinnedArena& arena, const Pages& from,
                                        const Pages& to) const {
  Job job{.lane = lane, .arena = arena, .from = from, .to = to, .copied = {}};
  const std::vector<std::span<const std::byte>> pinned = arena.Pinned();
  const auto readable = [&](const Page& page) {
    if (blocks_ == 0) return false;
    const std::byte* end =
        page.layer(parts_.geometry.layers - 1) + parts_.geometry.layer_stride(page.format);
    auto range = std::upper_bound(pinned.begin(), pinned.end(), page.tiles,
                                  [](const std::byte* at, const auto& r) { return at < r.data(); });
    return range != pinned.begin() && end <= std::prev(range)->data() + std::prev(range)->size();
  };
  job.copied.reserve(to.size());
  for (size_t i = 0; i < to.size(); ++i) {
    job.copied.push_back(readable(*from[i]) ? 0 : 1);
    job.any_copied |= job.copied.back() != 0;
    job.all_copied &= job.copied.back() != 0;
  }
  return job;
}

void PrefixLoader::FillPlaces(const Job& job) const {
  const auto pages = static_cast<int>(job.to.size());
  const Tables tables = TablesAt(reinterpret_cast<uint64_t>(job.lane.staging.get()), pages);
  for (int i = 0; i < pages; ++i) {
    const Page& from = *job.from[i];
    const Page& to = *job.to[i];
    const bool copied = job.copied[i] != 0;
    tables.status[i] = 0;
    tables.to[i] = reinterpret_cast<uint64_t>(to.tiles);
    tables.from[i] = copied ? tables.to[i] : reinterpret_cast<uint64_t>(from.tiles);
    tables.from_stride[i] = static_cast<int64_t>(copied ? to.layer_stride : from.layer_stride);
  }
}

// With the first layer's goes what lies before them.
absl::Status PrefixLoader::SendSums(const Job& job, int layer_begin, int layer_end) {
  const auto pages = static_cast<int>(job.to.size());
  const auto staging = reinterpret_cast<uint64_t>(job.lane.staging.get());
  const Tables tables = TablesAt(staging, pages);
  const size_t heads = parts_.geometry.kv_heads;
  for (int i = 0; i < pages; ++i) {
    const uint32_t* from = job.to[i]->tile_sums.data();
    for (int layer = layer_begin; layer < layer_end; ++layer) {
      std::copy_n(from + heads * layer, heads,
                  tables.sums + heads * (size_t{1} * pages * layer + i));
    }
  }
  const auto place = [&](int layer) {
    return layer == 0 ? 0
                      : reinterpret_cast<uint64_t>(tables.sums + heads * pages * layer) - staging;
  };
  const uint64_t begin = place(layer_begin), end = place(layer_end);
  const DeviceCopy copy{job.lane.tables.get() + begin, staging + begin, end - begin};
  return parts_.device.ToDevice({&copy, 1}, stream_.get());
}

// The kernel takes a layer at a time. Copies cost by their number: they take twice as many layers
// each time.
absl::Status PrefixLoader::Enqueue(const Job& job) {
  const auto pages = static_cast<int>(job.to.size());
  const int layers = parts_.geometry.layers;
  const int sinks = job.to.front()->format == PageFormat::kBf16 ? 1 : 0;
  Device& device = parts_.device;
  FillPlaces(job);
  for (int layer = 0; layer < layers;) {
    const int end = job.any_copied ? std::min(layers, 2 * layer + 1) : layer + 1;
    // The first layer is on its way while the host gathers the sums of the others.
    if (layer < 2) {
      CRUMB_RETURN_IF_ERROR(SendSums(job, layer, layer == 0 ? end : layers));
    }
    // The rest of the sink, a small part of a prefix, comes before the second layer.
    if (layer < 2) {
      const int sink_end = layer == 0 ? end : layers;
      CRUMB_RETURN_IF_ERROR(EnqueueLayers(job, 0, sinks, layer, sink_end));
    }
    CRUMB_RETURN_IF_ERROR(EnqueueLayers(job, sinks, pages, layer, end));
    for (; layer < end; ++layer) {
      CRUMB_RETURN_IF_ERROR(device.Record(job.lane.layer_done[layer].get(), stream_.get()));
    }
  }
  const DeviceCopy status{reinterpret_cast<uint64_t>(job.lane.staging.get()), job.lane.tables.get(),
                          sizeof(uint32_t) * pages};
  CRUMB_RETURN_IF_ERROR(device.ToHost({&status, 1}, stream_.get()));
  return device.Record(job.lane.all_done.get(), stream_.get());
}

std::vector<DeviceCopy> PrefixLoader::CopiesOf(const Job& job, int page_begin, int page_end,
                                               int layer_begin, int layer_end) const {
  std::vector<DeviceCopy> copies;
  for (int i = page_begin; i < page_end; ++i) {
    if (job.copied[i] == 0) continue;
    const Page& from = *job.from[i];
    const Page& to = *job.to[i];
    const int layers = from.layer_stride == to.layer_stride ? layer_end - layer_begin : 1;
    for (int layer = layer_begin; layer < layer_end; layer += layers) {
      copies.push_back({reinterpret_cast<uint64_t>(to.layer(layer)),
                        reinterpret_cast<uint64_t>(from.layer(layer)), to.layer_stride * layers});
    }
  }
  return job.arena.CutToDevice(copies);
}

absl::Status PrefixLoader::EnqueueLayers(const Job& job, int page_begin, int page_end,
                                         int layer_begin, int layer_end) {
  if (page_begin == page_end || layer_begin == layer_end) return absl::OkStatus();
  const DeviceGeometry& g = parts_.geometry;
  if (job.any_copied) {
    CRUMB_RETURN_IF_ERROR(parts_.device.ToDevice(
        CopiesOf(job, page_begin, page_end, layer_begin, layer_end), stream_.get()));
  }
  const Tables tables = TablesAt(job.lane.tables.get(), static_cast<int>(job.to.size()));
  const Page& shape = *job.to[page_begin];
  kernels::cuda::FetchParams params;
  params.tile_bytes = shape.tile_bytes;
  params.runs = page_end - page_begin;
  params.tiles_per_run = g.kv_heads;
  params.layer_begin = layer_begin;
  params.layer_end = layer_end;
  params.from = tables.from + page_begin;
  params.from_layer_stride = tables.from_stride + page_begin;
  params.to = tables.to + page_begin;
  params.to_layer_stride = static_cast<int64_t>(shape.layer_stride);
  params.sums = tables.sums + int64_t{1} * page_begin * g.kv_heads;
  params.sums_layer_stride = int64_t{1} * g.kv_heads * static_cast<int64_t>(job.to.size());
  params.status = tables.status + page_begin;
  params.blocks = job.all_copied ? 0 : blocks_;
  return parts_.device.kernels().Fetch(params, stream_.get());
}

// Crumbd's memory is held until the copies are done, and so are the slots.
void PrefixLoader::SeeOff(const std::shared_ptr<PrefixLoad>& load,
                          std::shared_ptr<const PinnedArena> arena, const Keyspace& keyspace,
                          Pages from, const Pages& to) {
  parts_.background.Add(
      [this, load, arena = std::move(arena), keyspace, from = std::move(from), to] {
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
