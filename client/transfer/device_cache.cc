// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "client/transfer/device_cache.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "client/transfer/device_cache_layout.h"
#include "common/page_key.h"
#include "common/status_macros.h"
#include "fmt/format.h"

namespace crumb::client {
namespace {

// Lanes of each direction: one is copied while a kernel works on the other.
constexpr int kLanes = 2;
// Bound on the pages of one launch, which fixes the size of its tables.
constexpr int kChunkPagesMax = 64;
// Bytes of the scratch rows of a store. 128 MiB are 14 pages of such a model, whose 4,000 tiles
// fill a GPU several times.
constexpr size_t kWorkspaceBytes = size_t{128} << 20;

}  // namespace

DeviceCache::DeviceCache(std::shared_ptr<Device> device, const WorkerOptions& options,
                         Client& client)
    : device_(std::move(device)),
      options_(options),
      geometry_(options),
      pinner_(*device_, &client, DeviceWorkerOptions().pin_piece_bytes) {}

absl::StatusOr<std::shared_ptr<DeviceCache>> DeviceCache::Create(std::shared_ptr<Device> device,
                                                                 const WorkerOptions& options,
                                                                 const PagedCache& cache,
                                                                 const DeviceCacheOptions& sizes,
                                                                 Client& client) {
  std::shared_ptr<DeviceCache> made(new DeviceCache(std::move(device), options, client));
  CRUMB_RETURN_IF_ERROR(made->Allocate(cache, sizes));
  return made;
}

absl::Status DeviceCache::Allocate(const PagedCache& cache, const DeviceCacheOptions& sizes) {
  if (!device_->kernels().Supports(geometry_.tile)) {
    return absl::InvalidArgumentError(
        fmt::format("the device's kernels do not support head_dim {} and group_size {}",
                    geometry_.head_dim, geometry_.tile.group_size));
  }
  CRUMB_ASSIGN_OR_RETURN(kv_, DeviceLayoutOf(cache));
  lane_bytes_ = std::max(sizes.lane_bytes, geometry_.page_bytes(PageFormat::kBf16));
  CRUMB_ASSIGN_OR_RETURN(setup_, NewStream(*device_));
  CRUMB_ASSIGN_OR_RETURN(setup_done_, NewEvent(*device_));
  CRUMB_ASSIGN_OR_RETURN(constants_, DeviceConstants::Upload(*device_, options_));
  CRUMB_RETURN_IF_ERROR(SendMeans());
  CRUMB_RETURN_IF_ERROR(SendAddresses(cache));
  kernels::cuda::EvictParams largest;
  largest.tile = geometry_.tile;
  largest.layers = geometry_.layers;
  largest.kv_heads = geometry_.kv_heads;
  largest.windows_max =
      std::max(StorePagesMax(PageFormat::kInt2), StorePagesMax(PageFormat::kBf16));
  workspace_bytes_ = device_->kernels().QuantizeFromWorkspaceBytes(largest);
  CRUMB_ASSIGN_OR_RETURN(workspace_, NewDeviceBuffer(*device_, workspace_bytes_));
  CRUMB_ASSIGN_OR_RETURN(workspace_used_, NewEvent(*device_));
  if (sizes.launches_max < 1) return absl::InvalidArgumentError("launches_max must be 1 at least");
  CRUMB_RETURN_IF_ERROR(AllocateLanes(cache.block_tokens, sizes.launches_max, stores_));
  CRUMB_RETURN_IF_ERROR(AllocateLanes(cache.block_tokens, sizes.launches_max, loads_));
  CRUMB_ASSIGN_OR_RETURN(heap_, PinnedHeap::Create(device_, sizes.staging_bytes));
  CRUMB_RETURN_IF_ERROR(LoadKernels());
  pinner_.Use();
  return absl::OkStatus();
}

absl::Status DeviceCache::LoadKernels() {
  MutexLock lock(&stores_.mutex);
  CRUMB_ASSIGN_OR_RETURN(LaunchTables::Slot* const slot, stores_.tables->Next());
  *slot->host.pages = 0;
  CRUMB_RETURN_IF_ERROR(stores_.tables->Send(*slot, setup_.get()));
  for (const PageFormat format : {PageFormat::kInt2, PageFormat::kBf16}) {
    const auto page = std::make_shared<Page>();
    page->format = format;
    const Pages pages(&page, 1);
    const DeviceCopyWork work = {
        .pages = pages, .blocks = {}, .layer_begin = 0, .layer_end = geometry_.layers};
    CRUMB_RETURN_IF_ERROR(Quantize(work, pages, slot->device, setup_.get()));
    CRUMB_RETURN_IF_ERROR(Dequantize(work, pages, slot->device, setup_.get()));
  }
  CRUMB_RETURN_IF_ERROR(stores_.tables->Queued(*slot, setup_.get()));
  CRUMB_RETURN_IF_ERROR(device_->Record(setup_done_.get(), setup_.get()));
  return device_->Synchronize(setup_done_.get());
}

absl::Status DeviceCache::AllocateLanes(int block_tokens, int launches_max, Lanes& lanes) {
  MutexLock lock(&lanes.mutex);
  for (int i = 0; i < kLanes; ++i) {
    Lane& lane = lanes.lanes.emplace_back();
    CRUMB_ASSIGN_OR_RETURN(lane.tiles, NewDeviceBuffer(*device_, lane_bytes_));
    CRUMB_ASSIGN_OR_RETURN(lane.filled, NewEvent(*device_));
    CRUMB_ASSIGN_OR_RETURN(lane.emptied, NewEvent(*device_));
  }
  const int blocks = kChunkPagesMax * kPageTokens / block_tokens + 2;
  CRUMB_ASSIGN_OR_RETURN(lanes.tables,
                         LaunchTables::Create(*device_, launches_max, kChunkPagesMax, blocks));
  CRUMB_ASSIGN_OR_RETURN(lanes.copies, NewStream(*device_));
  return absl::OkStatus();
}

absl::Status DeviceCache::Send(const void* from, size_t bytes, DeviceBuffer* to) {
  CRUMB_ASSIGN_OR_RETURN(*to, NewDeviceBuffer(*device_, bytes));
  const DeviceCopy copy{to->get(), reinterpret_cast<uint64_t>(from), bytes};
  CRUMB_RETURN_IF_ERROR(device_->ToDevice({&copy, 1}, setup_.get()));
  CRUMB_RETURN_IF_ERROR(device_->Record(setup_done_.get(), setup_.get()));
  return device_->Synchronize(setup_done_.get());
}

absl::Status DeviceCache::SendAddresses(const PagedCache& cache) {
  std::vector<uint64_t> addresses;
  for (const auto& layer : cache.layers) {
    addresses.push_back(reinterpret_cast<uint64_t>(layer.k.base));
  }
  for (const auto& layer : cache.layers) {
    addresses.push_back(reinterpret_cast<uint64_t>(layer.v.base));
  }
  CRUMB_RETURN_IF_ERROR(Send(addresses.data(), addresses.size() * sizeof(uint64_t), &addresses_));
  kv_.k_address = reinterpret_cast<const uint64_t*>(addresses_.get());
  kv_.v_address = kv_.k_address + geometry_.layers;
  if (cache.element == RowElement::kBf16) return absl::OkStatus();
  std::vector<float> scales;
  for (const auto& layer : cache.layers) scales.push_back(layer.k.scale);
  for (const auto& layer : cache.layers) scales.push_back(layer.v.scale);
  return Send(scales.data(), scales.size() * sizeof(float), &scales_);
}

const float* DeviceCache::Scales(bool value, int layer) const {
  if (scales_.get() == 0) return nullptr;
  return reinterpret_cast<const float*>(scales_.get()) + (value ? geometry_.layers : 0) + layer;
}

absl::Status DeviceCache::SendMeans() {
  const ModelBasisMeans means = ModelBasisMeansOf(options_);
  if (!means.k.empty()) {
    CRUMB_RETURN_IF_ERROR(Send(means.k.data(), means.k.size() * sizeof(float), &means_.k));
  }
  if (!means.v.empty()) {
    CRUMB_RETURN_IF_ERROR(Send(means.v.data(), means.v.size() * sizeof(float), &means_.v));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::shared_ptr<std::byte>> DeviceCache::AllocatePage(size_t tiles_bytes) {
  const size_t words = sizeof(uint32_t) * static_cast<size_t>(geometry_.layers);
  CRUMB_ASSIGN_OR_RETURN(std::shared_ptr<std::byte> memory, heap_->Allocate(tiles_bytes + words));
  std::memset(memory.get() + tiles_bytes, 0, words);
  return memory;
}

uint32_t DeviceCache::StatusOf(const Page& page) const {
  uint32_t status = 0;
  for (int layer = 0; layer < geometry_.layers; ++layer) {
    uint32_t word = 0;
    std::memcpy(&word, page.tiles + page.bytes + sizeof(word) * layer, sizeof(word));
    status |= word;
  }
  return status;
}

DeviceCache::Pages DeviceCache::TakeChunk(Pages* rest, int pages_max) const {
  size_t count = 1;
  while (count < rest->size() && count < static_cast<size_t>(pages_max) &&
         (*rest)[count]->format == rest->front()->format) {
    ++count;
  }
  const Pages taken = rest->first(count);
  *rest = rest->subspan(count);
  return taken;
}

int DeviceCache::LoadPagesMax(PageFormat format) const {
  return static_cast<int>(
      std::clamp<size_t>(lane_bytes_ / geometry_.page_bytes(format), 1, kChunkPagesMax));
}

int DeviceCache::StorePagesMax(PageFormat format) const {
  const size_t rows =
      std::max<size_t>(1, kWorkspaceBytes / geometry_.page_bytes(PageFormat::kBf16));
  return std::min(LoadPagesMax(format), static_cast<int>(std::min<size_t>(rows, kChunkPagesMax)));
}

int DeviceCache::PositionBlock(const Page& page) const {
  const RotationSet& rotations = options_.rotations;
  return std::clamp((static_cast<int>(page.position) - 1) / rotations.pages_per_position_block(), 0,
                    rotations.position_blocks() - 1);
}

size_t DeviceCache::ChunkPageBytes(const DeviceCopyWork& work, PageFormat format) const {
  return geometry_.layer_stride(format) * static_cast<size_t>(work.layer_end - work.layer_begin);
}

void DeviceCache::FillTables(const DeviceCopyWork& work, Pages pages, const Lane& lane,
                             const LaunchTable& table) const {
  const size_t page_bytes = ChunkPageBytes(work, pages.front()->format);
  const int64_t tokens = kv_.block_tokens;
  const int64_t first_block = int64_t{pages.front()->position} * kPageTokens / tokens;
  const int64_t end = (int64_t{pages.back()->position} + 1) * kPageTokens;
  *table.pages = static_cast<int32_t>(pages.size());
  for (size_t i = 0; i < pages.size(); ++i) {
    table.tile_address[i] = lane.tiles.get() + page_bytes * i;
    table.sequence[i] = 0;
    table.first_token[i] =
        static_cast<int32_t>(int64_t{pages[i]->position} * kPageTokens - first_block * tokens);
    table.position_block[i] = PositionBlock(*pages[i]);
    table.status[i] = 0;
  }
  const int64_t blocks = (end + tokens - 1) / tokens - first_block;
  for (int64_t i = 0; i < blocks; ++i) {
    table.blocks[i] = static_cast<int32_t>(work.blocks[first_block + i]);
  }
}

kernels::cuda::PagedKv DeviceCache::KvOf(const DeviceCopyWork& work, Pages pages,
                                         const LaunchTable& table) const {
  kernels::cuda::PagedKv kv = kv_;
  kv.k_address += work.layer_begin;
  kv.v_address += work.layer_begin;
  kv.block_table = table.blocks;
  kv.blocks_max = static_cast<int>(pages.size()) * kPageTokens / kv.block_tokens + 2;
  return kv;
}

// Returns the constants of the layers from `layer` on.
kernels::cuda::EvictTransform DeviceCache::FromLayer(const kernels::cuda::EvictTransform& all,
                                                     int layer) const {
  kernels::cuda::EvictTransform from = all;
  const DeviceKernels& kernels = device_->kernels();
  const size_t matrices = static_cast<size_t>(layer) * geometry_.kv_heads;
  if (from.rotation != nullptr) {
    from.rotation = reinterpret_cast<const kernels::cuda::EvictRotation*>(
        reinterpret_cast<uint64_t>(from.rotation) +
        matrices * kernels.RotationBytes(geometry_.head_dim));
  }
  if (from.feedback != nullptr) {
    from.feedback = reinterpret_cast<const kernels::cuda::EvictFeedback*>(
        reinterpret_cast<uint64_t>(from.feedback) +
        matrices * kernels.FeedbackBytes(geometry_.head_dim));
  }
  if (from.mean != nullptr) {
    from.mean += matrices * options_.rotations.position_blocks() * geometry_.head_dim;
  }
  return from;
}

absl::Status DeviceCache::Quantize(const DeviceCopyWork& work, Pages pages,
                                   const LaunchTable& table, DeviceStream stream) {
  const PageFormat format = pages.front()->format;
  kernels::cuda::QuantizeFromParams params;
  params.evict.tile = geometry_.tile;
  params.evict.format = format;
  params.evict.method = options_.method;
  params.evict.layers = work.layer_end - work.layer_begin;
  params.evict.kv_heads = geometry_.kv_heads;
  params.evict.windows_max = static_cast<int>(pages.size());
  params.evict.windows = table.pages;
  params.evict.tile_address = table.tile_address;
  params.evict.tile_layer_stride = static_cast<int64_t>(geometry_.layer_stride(format));
  params.evict.tile_head_stride = static_cast<int64_t>(geometry_.tile.bytes(format));
  params.evict.k = FromLayer(constants_->evict_k(), work.layer_begin);
  params.evict.v = FromLayer(constants_->evict_v(), work.layer_begin);
  params.evict.position_block = table.position_block;
  params.evict.position_blocks = options_.rotations.position_blocks();
  params.evict.status = table.status;
  params.tokens = {.sequence = table.sequence, .first_token = table.first_token};
  params.kv = KvOf(work, pages, table);
  params.k_scale = Scales(false, work.layer_begin);
  params.v_scale = Scales(true, work.layer_begin);
  params.workspace = reinterpret_cast<void*>(workspace_.get());
  return device_->kernels().QuantizeFrom(params, stream);
}

absl::Status DeviceCache::CopyOut(const DeviceCopyWork& work, Pages pages, const Lane& lane,
                                  const LaunchTable& table) {
  const size_t bytes = ChunkPageBytes(work, pages.front()->format);
  std::vector<DeviceCopy> copies;
  copies.reserve(2 * pages.size());
  for (size_t i = 0; i < pages.size(); ++i) {
    const Page& page = *pages[i];
    copies.push_back({reinterpret_cast<uint64_t>(page.layer(work.layer_begin)),
                      lane.tiles.get() + bytes * i, bytes});
    copies.push_back(
        {reinterpret_cast<uint64_t>(page.tiles + page.bytes + sizeof(uint32_t) * work.layer_begin),
         reinterpret_cast<uint64_t>(table.status + i), sizeof(uint32_t)});
  }
  return device_->ToHost(copies, stores_.copies.get());
}

absl::Status DeviceCache::StoreChunk(const DeviceCopyWork& work, Pages pages, DeviceStream stream) {
  Lane& lane = stores_.lanes[stores_.next];
  CRUMB_ASSIGN_OR_RETURN(LaunchTables::Slot* const slot, stores_.tables->Next());
  FillTables(work, pages, lane, slot->host);
  if (lane.used) CRUMB_RETURN_IF_ERROR(device_->Wait(stream, lane.emptied.get()));
  CRUMB_RETURN_IF_ERROR(device_->Wait(stream, workspace_used_.get()));
  stores_.next = (stores_.next + 1) % stores_.lanes.size();
  lane.used = true;
  CRUMB_RETURN_IF_ERROR(stores_.tables->Send(*slot, stream));
  const absl::Status quantized = Quantize(work, pages, slot->device, stream);
  // The events stand for work that was enqueued before an error, too: later work uses its tables,
  // its lane and the workspace again.
  CRUMB_RETURN_IF_ERROR(device_->Record(workspace_used_.get(), stream));
  CRUMB_RETURN_IF_ERROR(device_->Record(lane.filled.get(), stream));
  CRUMB_RETURN_IF_ERROR(device_->Wait(stores_.copies.get(), lane.filled.get()));
  absl::Status copied = quantized.ok() ? CopyOut(work, pages, lane, slot->device) : quantized;
  CRUMB_RETURN_IF_ERROR(stores_.tables->Queued(*slot, stores_.copies.get()));
  CRUMB_RETURN_IF_ERROR(device_->Record(lane.emptied.get(), stores_.copies.get()));
  return copied;
}

absl::Status DeviceCache::Store(const DeviceCopyWork& work, DeviceStream stream, DeviceEvent done) {
  MutexLock lock(&stores_.mutex);
  absl::Status queued;
  for (Pages rest = work.pages;
       !rest.empty() && queued.ok() && work.layer_begin < work.layer_end;) {
    const int pages_max = StorePagesMax(rest.front()->format);
    queued = StoreChunk(work, TakeChunk(&rest, pages_max), stream);
  }
  // Recorded after an error too, because earlier copies may be in flight.
  CRUMB_RETURN_IF_ERROR(device_->Record(done, stores_.copies.get()));
  return queued;
}

absl::Status DeviceCache::CopyIn(const DeviceCopyWork& work, Pages pages, const PinnedArena& arena,
                                 const Lane& lane) {
  const PageFormat format = pages.front()->format;
  const size_t layer_bytes = geometry_.layer_stride(format);
  const size_t page_bytes = ChunkPageBytes(work, format);
  std::vector<DeviceCopy> copies;
  copies.reserve(pages.size());
  for (size_t i = 0; i < pages.size(); ++i) {
    const Page& page = *pages[i];
    // In a fragment with more heads than this rank's, each layer is a separate piece.
    const int layers = page.layer_stride == layer_bytes ? work.layer_end - work.layer_begin : 1;
    for (int layer = work.layer_begin; layer < work.layer_end; layer += layers) {
      const size_t offset = layer_bytes * static_cast<size_t>(layer - work.layer_begin);
      copies.push_back({lane.tiles.get() + page_bytes * i + offset,
                        reinterpret_cast<uint64_t>(page.layer(layer)), layer_bytes * layers});
    }
  }
  return device_->ToDevice(arena.CutToDevice(copies), loads_.copies.get());
}

absl::Status DeviceCache::Dequantize(const DeviceCopyWork& work, Pages pages,
                                     const LaunchTable& table, DeviceStream stream) {
  const PageFormat format = pages.front()->format;
  const int blocks = options_.rotations.position_blocks();
  const auto mean = [&](const DeviceBuffer& means) -> const float* {
    if (means.get() == 0) return nullptr;
    return reinterpret_cast<const float*>(means.get()) +
           int64_t{work.layer_begin} * geometry_.kv_heads * blocks * geometry_.head_dim;
  };
  kernels::cuda::DequantizeParams params;
  params.tile = geometry_.tile;
  params.format = format;
  params.layers = work.layer_end - work.layer_begin;
  params.kv_heads = geometry_.kv_heads;
  params.pages_max = static_cast<int>(pages.size());
  params.pages = table.pages;
  params.page_address = table.tile_address;
  params.tile_layer_stride = static_cast<int64_t>(geometry_.layer_stride(format));
  params.tile_head_stride = static_cast<int64_t>(geometry_.tile.bytes(format));
  params.tokens = {.sequence = table.sequence, .first_token = table.first_token};
  params.kv = KvOf(work, pages, table);
  params.k_scale = Scales(false, work.layer_begin);
  params.v_scale = Scales(true, work.layer_begin);
  params.k = {.rotation = constants_->dual_k(work.layer_begin), .mean = mean(means_.k)};
  params.v = {.rotation = constants_->dual_v(work.layer_begin), .mean = mean(means_.v)};
  params.position_block = table.position_block;
  params.position_blocks = blocks;
  return device_->kernels().Dequantize(params, stream);
}

absl::Status DeviceCache::LoadChunk(const DeviceCopyWork& work, Pages pages,
                                    const PinnedArena& arena, DeviceStream stream) {
  Lane& lane = loads_.lanes[loads_.next];
  CRUMB_ASSIGN_OR_RETURN(LaunchTables::Slot* const slot, loads_.tables->Next());
  FillTables(work, pages, lane, slot->host);
  if (lane.used) CRUMB_RETURN_IF_ERROR(device_->Wait(loads_.copies.get(), lane.emptied.get()));
  loads_.next = (loads_.next + 1) % loads_.lanes.size();
  lane.used = true;
  CRUMB_RETURN_IF_ERROR(loads_.tables->Send(*slot, stream));
  const absl::Status copied = CopyIn(work, pages, arena, lane);
  // The events include work that was enqueued before an error, too, which StoreChunk also does.
  CRUMB_RETURN_IF_ERROR(device_->Record(lane.filled.get(), loads_.copies.get()));
  CRUMB_RETURN_IF_ERROR(device_->Wait(stream, lane.filled.get()));
  absl::Status written = copied.ok() ? Dequantize(work, pages, slot->device, stream) : copied;
  CRUMB_RETURN_IF_ERROR(loads_.tables->Queued(*slot, stream));
  CRUMB_RETURN_IF_ERROR(device_->Record(lane.emptied.get(), stream));
  return written;
}

absl::Status DeviceCache::Load(const DeviceCopyWork& work, const PinnedArena& arena,
                               DeviceStream stream, DeviceEvent done) {
  MutexLock lock(&loads_.mutex);
  absl::Status queued;
  for (Pages rest = work.pages;
       !rest.empty() && queued.ok() && work.layer_begin < work.layer_end;) {
    const int pages_max = LoadPagesMax(rest.front()->format);
    queued = LoadChunk(work, TakeChunk(&rest, pages_max), arena, stream);
  }
  // Recorded after an error too, because earlier work may be in flight.
  CRUMB_RETURN_IF_ERROR(device_->Record(done, stream));
  return queued;
}

}  // namespace crumb::client
