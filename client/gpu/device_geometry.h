// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "client/gpu/device_page.h"
#include "client/worker/page.h"
#include "common/page_key.h"
#include "crumb/worker_options.h"
#include "kernels/cuda/decode/decode_call.h"

namespace crumb::client {

// RingShape describes the BF16 rows of one sequence's latest tokens, [layers, K and V, kv_heads,
// capacity, head_dim]: the row of position p lies in slot p % capacity. Strides are in bytes.
//
// Decode rings have recent_tokens + 64 + 1 + draft_slots rows, prompt rings have room for a prefill
// block and the window. A sequence that leaves its prompt moves to a decode ring.
struct RingShape {
  int capacity = 0;
  int64_t token_stride = 0;
  int64_t head_stride = 0;
  int64_t v_offset = 0;
  int64_t layer_stride = 0;
  size_t bytes = 0;

  kernels::cuda::Bf16Rows Rows(int layer, const uint64_t* addresses) const {
    return {.address = addresses,
            .layer_offset = layer * layer_stride,
            .head_stride = head_stride,
            .token_stride = token_stride,
            .v_offset = v_offset};
  }
};

// DeviceGeometry has the sizes and strides of a rank's data in device memory.
//
// A page is [layers, kv_heads] tiles without gaps; the sink is a page whose tiles are BF16, K
// before V.
struct DeviceGeometry {
  explicit DeviceGeometry(const WorkerOptions& options)
      : layers(options.own_layers()),
        kv_heads(options.own_kv_heads()),
        q_heads(options.own_q_heads()),
        head_dim(options.head_dim),
        tile(options.tile_shape()) {}

  int layers, kv_heads, q_heads, head_dim;
  kernels::TileShape tile;

  int tiles() const { return layers * kv_heads; }
  size_t layer_stride(kernels::PageFormat format) const { return tile.bytes(format) * kv_heads; }
  size_t page_bytes(kernels::PageFormat format) const { return layer_stride(format) * layers; }

  RingShape Ring(int capacity) const {
    const int64_t row = int64_t{2} * head_dim;
    return {.capacity = capacity,
            .token_stride = row,
            .head_stride = row * capacity,
            .v_offset = row * capacity * kv_heads,
            .layer_stride = 2 * row * capacity * kv_heads,
            .bytes = static_cast<size_t>(2 * row * capacity * kv_heads * layers)};
  }

  // Returns the rows of sinks, which are laid out as BF16 pages.
  kernels::cuda::Bf16Rows SinkRows(int layer, const uint64_t* addresses) const {
    const auto tile_bytes = static_cast<int64_t>(tile.bf16_bytes());
    return {.address = addresses,
            .layer_offset = layer * tile_bytes * kv_heads,
            .head_stride = tile_bytes,
            .token_stride = int64_t{2} * head_dim,
            .v_offset = tile_bytes / 2};
  }

  // Creates a page without key in `slot`.
  std::shared_ptr<DevicePage> NewPage(kernels::PageFormat format,
                                      std::shared_ptr<const SlotRef> slot) const {
    return Filled(std::make_shared<DevicePage>(), format, std::move(slot));
  }
  // Does the same with memory of `run`, for the pages of a prefix.
  std::shared_ptr<DevicePage> NewPage(kernels::PageFormat format,
                                      std::shared_ptr<const SlotRef> slot,
                                      RunAllocator<DevicePage>& run) const {
    return Filled(run.New(), format, std::move(slot));
  }

 private:
  std::shared_ptr<DevicePage> Filled(std::shared_ptr<DevicePage> page, kernels::PageFormat format,
                                     std::shared_ptr<const SlotRef> slot) const {
    page->format = format;
    page->tile_bytes = tile.bytes(format);
    page->layer_stride = layer_stride(format);
    page->bytes = page_bytes(format);
    page->tiles = reinterpret_cast<std::byte*>(slot->address);
    page->slot = std::move(slot);
    return page;
  }
};

}  // namespace crumb::client
