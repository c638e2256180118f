// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "client/gpu/page_check.h"

#include <algorithm>
#include <utility>

#include "common/status_macros.h"

namespace crumb::client {
namespace {

// Thread blocks of a launch; few, so that other streams keep most of an H200's 132 SMs.
constexpr int kBlocks = 8;

}  // namespace

absl::StatusOr<std::unique_ptr<PageCheck>> PageCheck::Create(Device& device,
                                                             const DeviceGeometry& geometry,
                                                             size_t pages_max) {
  std::unique_ptr<PageCheck> check(new PageCheck(device, geometry, pages_max));
  CRUMB_ASSIGN_OR_RETURN(check->stream_, NewStream(device));
  CRUMB_ASSIGN_OR_RETURN(check->done_, NewEvent(device));
  const size_t bytes = check->TablesAt(0).bytes;
  CRUMB_ASSIGN_OR_RETURN(check->memory_, NewDeviceBuffer(device, bytes));
  CRUMB_ASSIGN_OR_RETURN(check->staging_, NewPinnedBuffer(device, bytes));
  return check;
}

PageCheck::Tables PageCheck::TablesAt(uint64_t base) const {
  const uint64_t status = base + sizeof(uint64_t) * pages_max_;
  const uint64_t sums = status + sizeof(uint32_t) * pages_max_;
  const uint64_t end = sums + sizeof(uint32_t) * pages_max_ * geometry_.tiles();
  return {reinterpret_cast<uint64_t*>(base), reinterpret_cast<uint32_t*>(status),
          reinterpret_cast<uint32_t*>(sums), end - base};
}

absl::StatusOr<std::vector<bool>> PageCheck::FindDamaged(
    std::span<const std::shared_ptr<const Page>> pages,
    std::span<const std::span<const uint32_t>> sums) {
  if (pages.size() > pages_max_) return absl::InvalidArgumentError("too many pages to look at");
  const Tables host = TablesAt(reinterpret_cast<uint64_t>(staging_.get()));
  const auto tiles = static_cast<size_t>(geometry_.tiles());
  for (size_t i = 0; i < pages.size(); ++i) {
    if (sums[i].size() != tiles) return absl::InvalidArgumentError("not one sum for each tile");
    host.to[i] = reinterpret_cast<uint64_t>(pages[i]->tiles);
    host.status[i] = 0;
    std::copy_n(sums[i].data(), tiles, host.sums + tiles * i);
  }
  const absl::Status enqueued = Enqueue(pages);
  // Waits even after an error, because some launches may be reading the pages.
  CRUMB_RETURN_IF_ERROR(device_.Record(done_.get(), stream_.get()));
  CRUMB_RETURN_IF_ERROR(device_.Synchronize(done_.get()));
  CRUMB_RETURN_IF_ERROR(enqueued);
  std::vector<bool> damaged(pages.size());
  for (size_t i = 0; i < pages.size(); ++i) damaged[i] = host.status[i] != 0;
  return damaged;
}

absl::Status PageCheck::Enqueue(std::span<const std::shared_ptr<const Page>> pages) {
  const auto staging = reinterpret_cast<uint64_t>(staging_.get());
  const Tables host = TablesAt(staging), tables = TablesAt(memory_.get());
  const DeviceCopy in{memory_.get(), staging, host.bytes};
  CRUMB_RETURN_IF_ERROR(device_.ToDevice({&in, 1}, stream_.get()));
  for (size_t i = 0; i < pages.size(); ++i) {
    kernels::cuda::FetchParams params;
    params.tile_bytes = pages[i]->tile_bytes;
    params.pages = 1;
    params.tiles_per_layer = geometry_.kv_heads;
    params.layer_begin = 0;
    params.layer_end = geometry_.layers;
    params.to = tables.to + i;
    params.to_layer_stride = static_cast<int64_t>(pages[i]->layer_stride);
    params.checksums = tables.sums + i * static_cast<size_t>(geometry_.tiles());
    params.checksums_layer_stride = geometry_.kv_heads;
    params.status = tables.status + i;
    params.blocks = kBlocks;
    CRUMB_RETURN_IF_ERROR(device_.kernels().Fetch(params, stream_.get()));
  }
  const DeviceCopy out{reinterpret_cast<uint64_t>(host.status),
                       reinterpret_cast<uint64_t>(tables.status), sizeof(uint32_t) * pages.size()};
  return device_.ToHost({&out, 1}, stream_.get());
}

}  // namespace crumb::client
