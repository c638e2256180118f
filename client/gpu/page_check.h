// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/statusor.h"
#include "client/gpu/device/owned.h"
#include "client/gpu/device_geometry.h"
#include "client/worker/page.h"

namespace crumb::client {

// Sums the tiles of pages where they lie, on a stream of its own. A launch is one page on a few
// multiprocessors: what other streams enqueue waits for no more than that. One thread at a time.
class PageCheck {
 public:
  // Of `pages_max` pages at once. All borrowed.
  static absl::StatusOr<std::unique_ptr<PageCheck>> Create(Device& device,
                                                           const DeviceGeometry& geometry,
                                                           size_t pages_max);

  // Which of the pages, whose last tile is written, have a tile whose sum is not the one in `sums`:
  // one entry a page, layer by layer, head by head. Blocks until it is known.
  absl::StatusOr<std::vector<bool>> FindDamaged(std::span<const std::shared_ptr<const Page>> pages,
                                                std::span<const std::span<const uint32_t>> sums);

 private:
  // In pinned memory, and alike in the device's.
  struct Tables {
    uint64_t* to = nullptr;      // [pages_max]
    uint32_t* status = nullptr;  // [pages_max]
    uint32_t* sums = nullptr;    // [pages_max, layers, kv_heads]
    size_t bytes = 0;
  };

  PageCheck(Device& device, const DeviceGeometry& geometry, size_t pages_max)
      : device_(device), geometry_(geometry), pages_max_(pages_max) {}
  Tables TablesAt(uint64_t base) const;
  absl::Status Enqueue(std::span<const std::shared_ptr<const Page>> pages);

  Device& device_;
  const DeviceGeometry& geometry_;
  const size_t pages_max_;
  OwnedStream stream_;
  OwnedEvent done_;
  DeviceBuffer memory_;
  PinnedBuffer staging_;
};

}  // namespace crumb::client
