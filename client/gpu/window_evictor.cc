// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "client/gpu/window_evictor.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "common/status_macros.h"

namespace crumb::client {

using kernels::PageFormat;

absl::StatusOr<std::unique_ptr<WindowEvictor>> WindowEvictor::Create(
    const GpuWorkerParts& parts, const std::shared_ptr<Timeline>& timeline, int windows) {
  std::unique_ptr<WindowEvictor> evictor(new WindowEvictor(parts, timeline));
  CRUMB_RETURN_IF_ERROR(evictor->MakeArea(windows, &evictor->captured_));
  CRUMB_RETURN_IF_ERROR(evictor->MakeArea(parts.results.windows(), &evictor->now_));
  CRUMB_ASSIGN_OR_RETURN(evictor->none_, NewPinnedBuffer(parts.device, sizeof(int32_t)));
  std::memset(evictor->none_.get(), 0, sizeof(int32_t));
  return evictor;
}

absl::Status WindowEvictor::MakeArea(int windows_max, Area* area) {
  const DeviceGeometry& g = parts_.geometry;
  area->windows_max = windows_max;
  const int room = parts_.results.windows();
  CRUMB_ASSIGN_OR_RETURN(area->memory,
                         NewDeviceBuffer(parts_.device, EvictTable::Bytes(room, g.tiles())));
  area->table = EvictTable::At(area->memory.get(), room, g.tiles());
  const size_t bytes =
      parts_.device.kernels().EvictWorkspaceBytes(windows_max, g.layers, g.kv_heads);
  CRUMB_ASSIGN_OR_RETURN(area->workspace, NewDeviceBuffer(parts_.device, bytes));
  if (bytes == 0) return absl::OkStatus();
  return parts_.device.Clear(area->workspace.get(), bytes, timeline_->stream());
}

std::vector<UnsettledPage> WindowEvictor::Fill(uint64_t pass, std::span<const DueWindow> windows,
                                               const EvictTable& to) {
  const RotationSet& rotations = parts_.options.rotations;
  std::vector<UnsettledPage> pages;
  *to.windows = static_cast<int32_t>(windows.size());
  for (size_t i = 0; i < windows.size(); ++i) {
    GpuSequence& sequence = *windows[i].sequence;
    const int index = static_cast<int>(sequence.pages.size());
    auto page = parts_.geometry.NewPage(sequence.history_format(), windows[i].slot);
    page->written = {timeline_, pass};
    to.ring_address[i] = sequence.rows->address;
    to.tile_address[i] = page->address();
    to.ring_begin[i] = index * kPageTokens % sequence.ring().capacity;
    to.position_block[i] = std::clamp((index - 1) / rotations.pages_per_position_block(), 0,
                                      rotations.position_blocks() - 1);
    to.status[i] = 0;
    pages.push_back(sequence.AddPage(std::move(page)));
    sequence.last = {timeline_, pass};
  }
  return pages;
}

absl::Status WindowEvictor::HoldSamples(uint64_t pass, std::span<const DueWindow> windows,
                                        std::span<const UnsettledPage> pages,
                                        std::vector<SampledPage>* sampled) {
  for (size_t i = 0; i < windows.size(); ++i) {
    GpuSequence& sequence = *windows[i].sequence;
    if (sequence.sample == nullptr ||
        sequence.sample->page != static_cast<int>(pages[i].page->position)) {
      continue;
    }
    CRUMB_RETURN_IF_ERROR(parts_.watch->HoldRows(*sequence.sample, {timeline_, pass},
                                                 sequence.rows->address, sequence.ring()));
    sampled->push_back({std::move(sequence.sample), pages[i].page});
  }
  return absl::OkStatus();
}

void WindowEvictor::Measure(std::vector<SampledPage> sampled) {
  for (SampledPage& one : sampled) {
    parts_.watch->Measure(std::move(one.sample), std::move(one.page));
  }
}

absl::Status WindowEvictor::Upload(const EvictTable& from, const Area& area) {
  const DeviceCopy copy{reinterpret_cast<uint64_t>(area.table.windows),
                        reinterpret_cast<uint64_t>(from.windows), from.input_bytes()};
  return parts_.device.ToDevice({&copy, 1}, timeline_->stream());
}

absl::Status WindowEvictor::Launch(const Area& area, const RingShape& ring, PageFormat format) {
  const DeviceGeometry& g = parts_.geometry;
  kernels::cuda::EvictParams params;
  params.tile = g.tile;
  params.format = format;
  params.method = parts_.options.method;
  params.layers = g.layers;
  params.kv_heads = g.kv_heads;
  params.windows_max = area.windows_max;
  params.windows = area.table.windows;
  params.ring_address = area.table.ring_address;
  params.ring_begin = area.table.ring_begin;
  params.ring_capacity = ring.capacity;
  params.ring_layer_stride = ring.layer_stride;
  params.ring_head_stride = ring.head_stride;
  params.ring_token_stride = ring.token_stride;
  params.ring_v_offset = ring.v_offset;
  params.tile_address = area.table.tile_address;
  params.tile_layer_stride = static_cast<int64_t>(g.layer_stride(format));
  params.tile_head_stride = static_cast<int64_t>(g.tile.bytes(format));
  params.k = parts_.constants.evict_k();
  params.v = parts_.constants.evict_v();
  params.position_block = area.table.position_block;
  params.position_blocks = parts_.options.rotations.position_blocks();
  params.status = area.table.status;
  params.checksums = area.table.sums;
  params.workspace = reinterpret_cast<void*>(area.workspace.get());
  return parts_.device.kernels().Evict(params, timeline_->stream());
}

// Status and checksums are adjacent, so that one copy suffices.
absl::Status WindowEvictor::Download(const Area& area, size_t windows, const EvictTable& to) {
  const size_t sums = sizeof(uint32_t) * windows * parts_.geometry.tiles();
  const auto begin = reinterpret_cast<uint64_t>(to.status);
  const DeviceCopy copy{begin, reinterpret_cast<uint64_t>(area.table.status),
                        reinterpret_cast<uint64_t>(to.sums) - begin + sums};
  return parts_.device.ToHost({&copy, 1}, timeline_->stream());
}

absl::Status WindowEvictor::EvictSome(std::span<const DueWindow> windows) {
  const GpuSequence& first = *windows.front().sequence;
  CRUMB_ASSIGN_OR_RETURN(const uint64_t pass, timeline_->BeginPass());
  EvictResults::Table results = parts_.results.Take();
  std::vector<UnsettledPage> pages = Fill(pass, windows, *results);
  std::vector<SampledPage> sampled;
  CRUMB_RETURN_IF_ERROR(HoldSamples(pass, windows, pages, &sampled));
  CRUMB_RETURN_IF_ERROR(Upload(*results, now_));
  CRUMB_RETURN_IF_ERROR(Launch(now_, first.ring(), first.history_format()));
  CRUMB_RETURN_IF_ERROR(Download(now_, windows.size(), *results));
  CRUMB_RETURN_IF_ERROR(timeline_->EndPass());
  parts_.settler.Settle({timeline_, pass}, std::move(results), std::move(pages));
  Measure(std::move(sampled));
  return absl::OkStatus();
}

absl::Status WindowEvictor::EvictNow(std::span<const DueWindow> windows) {
  while (!windows.empty()) {
    const GpuSequence& first = *windows.front().sequence;
    const auto alike = [&](const GpuSequence& other) {
      return other.prompt_rows == first.prompt_rows &&
             other.history_format() == first.history_format();
    };
    size_t count = 1;
    while (count < windows.size() && count < static_cast<size_t>(now_.windows_max) &&
           alike(*windows[count].sequence)) {
      ++count;
    }
    CRUMB_RETURN_IF_ERROR(EvictSome(windows.first(count)));
    windows = windows.subspan(count);
  }
  return absl::OkStatus();
}

absl::Status WindowEvictor::Prepare(uint64_t pass, std::span<const DueWindow> windows) {
  results_ = nullptr;
  if (windows.empty()) {
    if (std::exchange(none_there_, true)) return absl::OkStatus();
    const DeviceCopy none{reinterpret_cast<uint64_t>(captured_.table.windows),
                          reinterpret_cast<uint64_t>(none_.get()), sizeof(int32_t)};
    return parts_.device.ToDevice({&none, 1}, timeline_->stream());
  }
  none_there_ = false;
  results_ = parts_.results.Take();
  pages_ = Fill(pass, windows, *results_);
  sampled_.clear();
  CRUMB_RETURN_IF_ERROR(HoldSamples(pass, windows, pages_, &sampled_));
  return Upload(*results_, captured_);
}

absl::Status WindowEvictor::Launch() {
  return Launch(captured_, parts_.decode_ring, PageFormat::kInt2);
}

absl::Status WindowEvictor::Collect() {
  return results_ == nullptr ? absl::OkStatus() : Download(captured_, pages_.size(), *results_);
}

void WindowEvictor::Settle(uint64_t pass) {
  if (results_ == nullptr) return;
  parts_.settler.Settle({timeline_, pass}, std::exchange(results_, nullptr),
                        std::exchange(pages_, {}));
  Measure(std::exchange(sampled_, {}));
}

}  // namespace crumb::client
