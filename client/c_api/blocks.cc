// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "client/c_api/core_table.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "client/c_api/handles.h"
#include "client/c_api/options.h"
#include "common/status_macros.h"
#include "crumb/block_attention.h"
#include "crumb/transfer.h"
#include "fmt/format.h"

namespace crumb::c_api {
namespace {

using kernels::Bf16;

client::BlockPool PoolOf(const crumb_block_pool& pool) {
  return {.history = static_cast<std::byte*>(pool.history),
          .sink = static_cast<std::byte*>(pool.sink),
          .recent = static_cast<std::byte*>(pool.recent),
          .block_stride = pool.block_stride,
          .blocks = static_cast<int64_t>(std::min<uint64_t>(pool.blocks, INT64_MAX))};
}

client::BlockBatch BatchOf(const crumb_block_batch& batch) {
  return {.requests = static_cast<int>(batch.requests),
          .query_start = batch.query_start,
          .lengths = batch.lengths,
          .history = {batch.history, batch.history_stride},
          .sink = {batch.sink, batch.sink_stride},
          .recent = {batch.recent, batch.recent_stride}};
}

client::FreshRows RowsOf(const crumb_block_rows& rows) {
  return {.q = static_cast<const Bf16*>(rows.q),
          .k = static_cast<const Bf16*>(rows.k),
          .v = static_cast<const Bf16*>(rows.v),
          .out = static_cast<Bf16*>(rows.out),
          .q_stride = rows.q_stride,
          .k_stride = rows.k_stride,
          .v_stride = rows.v_stride,
          .out_stride = rows.out_stride};
}

absl::Status CheckTables(const char* function, const crumb_block_batch& batch) {
  if (batch.requests > INT32_MAX) {
    return absl::InvalidArgumentError(fmt::format("a batch of {} requests", batch.requests));
  }
  const bool tables = batch.query_start != nullptr && batch.lengths != nullptr &&
                      batch.history != nullptr && batch.sink != nullptr && batch.recent != nullptr;
  if (batch.requests == 0 || tables) return absl::OkStatus();
  return absl::InvalidArgumentError(fmt::format("{}: a table is NULL", function));
}

absl::Status Check(const crumb_block_batch& batch, const crumb_block_rows& rows) {
  CRUMB_RETURN_IF_ERROR(CheckTables("crumb_block_attend", batch));
  const bool data =
      rows.q != nullptr && rows.k != nullptr && rows.v != nullptr && rows.out != nullptr;
  if (batch.requests == 0 || data) return absl::OkStatus();
  return absl::InvalidArgumentError("crumb_block_attend: rows are NULL");
}

}  // namespace

crumb_code GeometryOfBlocks(const crumb_worker_options* options, crumb_block_geometry* out) {
  return Guarded([&]() -> absl::Status {
    if (options == nullptr || out == nullptr) {
      return absl::InvalidArgumentError("crumb_block_geometry_of: options or out is NULL");
    }
    CRUMB_ASSIGN_OR_RETURN(const client::WorkerOptions wanted, OptionsOf(Known(options)));
    CRUMB_RETURN_IF_ERROR(wanted.Validate());
    const client::BlockGeometry geometry = client::BlockGeometryOf(wanted);
    const crumb_block_geometry values = {
        .size = out->size,
        .tile_bytes = static_cast<uint32_t>(geometry.tile_bytes),
        .rows_per_block = static_cast<uint32_t>(geometry.rows_per_block),
        .sink_blocks = static_cast<uint32_t>(geometry.sink_blocks),
        .recent_blocks = static_cast<uint32_t>(geometry.recent_blocks)};
    std::memcpy(out, &values, std::min(out->size, sizeof(values)));
    return absl::OkStatus();
  });
}

crumb_code BlockAttentionOpen(const crumb_worker_options* options, crumb_block_attention** out) {
  return Guarded([&]() -> absl::Status {
    if (options == nullptr || out == nullptr) {
      return absl::InvalidArgumentError("crumb_block_attention_open: options or out is NULL");
    }
    CRUMB_ASSIGN_OR_RETURN(const client::WorkerOptions wanted, OptionsOf(Known(options)));
    CRUMB_ASSIGN_OR_RETURN(auto attention, client::BlockAttention::Open(wanted));
    *out = new crumb_block_attention{std::move(attention)};
    return absl::OkStatus();
  });
}

void BlockAttentionClose(crumb_block_attention* attention) { delete attention; }

crumb_code BlockAttend(crumb_block_attention* attention, uint32_t layer,
                       const crumb_block_pool* pool, const crumb_block_batch* batch,
                       const crumb_block_rows* rows) {
  return Guarded([&]() -> absl::Status {
    const crumb_block_batch step = Known(batch);
    const crumb_block_rows fresh = Known(rows);
    CRUMB_RETURN_IF_ERROR(Check(step, fresh));
    return attention->attention->Attend(IntOf(layer), PoolOf(Known(pool)), BatchOf(step),
                                        RowsOf(fresh));
  });
}

crumb_code DeviceBlocksOpen(crumb_device* device, const crumb_worker_options* options,
                            const crumb_device_block_options* device_options,
                            crumb_device_blocks** out) {
  return Guarded([&]() -> absl::Status {
    if (options == nullptr || out == nullptr) {
      return absl::InvalidArgumentError("crumb_device_blocks_open: options or out is NULL");
    }
    CRUMB_ASSIGN_OR_RETURN(const client::WorkerOptions wanted, OptionsOf(Known(options)));
    const crumb_device_block_options given = Known(device_options);
    client::DeviceBlockLimits limits;
    for (const auto& [from, to] : {std::pair{given.requests, &limits.requests},
                                   {given.tokens, &limits.tokens},
                                   {given.pages, &limits.pages}}) {
      if (from != 0) *to = IntOf(from);
    }
    if (given.has_padding_block != 0) limits.padding_block = given.padding_block;
    CRUMB_ASSIGN_OR_RETURN(auto attention,
                           client::DeviceBlockAttention::Open(wanted, limits, *device->device));
    *out = new crumb_device_blocks{device->device, std::move(attention)};
    return absl::OkStatus();
  });
}

void DeviceBlocksClose(crumb_device_blocks* blocks) { delete blocks; }

uint64_t DeviceBlocksBytes(const crumb_device_blocks* blocks) {
  return blocks->attention->device_bytes();
}

crumb_code DeviceBlocksPrepare(crumb_device_blocks* blocks, const crumb_block_pool* pool,
                               const crumb_block_batch* batch, const crumb_block_step* step,
                               void* stream) {
  return Guarded([&]() -> absl::Status {
    const crumb_block_batch given = Known(batch);
    const crumb_block_step sizes = Known(step);
    CRUMB_RETURN_IF_ERROR(CheckTables("crumb_device_blocks_prepare", given));
    return blocks->attention->Prepare(PoolOf(Known(pool)), BatchOf(given),
                                      {.requests = IntOf(given.requests),
                                       .decodes = IntOf(sizes.decodes),
                                       .tokens = IntOf(sizes.tokens),
                                       .tokens_max = IntOf(sizes.tokens_max)},
                                      static_cast<client::DeviceStream>(stream));
  });
}

crumb_code DeviceBlocksAttend(crumb_device_blocks* blocks, uint32_t layer,
                              const crumb_block_pool* pool, const crumb_block_rows* rows,
                              void* stream) {
  return Guarded([&]() -> absl::Status {
    return blocks->attention->Attend(IntOf(layer), PoolOf(Known(pool)), RowsOf(Known(rows)),
                                     static_cast<client::DeviceStream>(stream));
  });
}

crumb_code DeviceBlocksCheck(crumb_device_blocks* blocks) {
  return Guarded([&] { return blocks->attention->TakeFault(); });
}

crumb_code TransferUseBlocks(crumb_transfer* transfer, const crumb_block_cache* given) {
  return Guarded([&]() -> absl::Status {
    const crumb_block_cache cache = Known(given);
    if (cache.pools == nullptr && cache.layers > 0) {
      return absl::InvalidArgumentError("crumb_transfer_use_blocks: pools is NULL");
    }
    client::BlockCache view;
    const auto* at = reinterpret_cast<const std::byte*>(cache.pools);
    for (uint32_t i = 0; i < cache.layers; ++i) {
      const auto* pool = reinterpret_cast<const crumb_block_pool*>(at);
      view.layers.push_back(PoolOf(Known(pool)));
      at += pool->size;  // the struct's size in the caller's version of the header
    }
    return transfer->transfer->UseBlocks(std::move(view));
  });
}

}  // namespace crumb::c_api
