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

// PageCheck verifies checksums of pages in device memory, on a stream of its own. A launch covers
// one page on a few SMs, so that other streams never wait for more than that. Used by one thread at
// a time.
class PageCheck {
 public:
  // Checks up to `pages_max` pages at once. Everything is borrowed.
  static absl::StatusOr<std::unique_ptr<PageCheck>> Create(Device& device,
                                                           const DeviceGeometry& geometry,
                                                           size_t pages_max);

  // Returns for each page whether it has a tile whose checksum is not the one in `sums`: one entry
  // per page, layer by layer, head by head. Blocks until the result is known. REQUIRES: the last
  // tile of each page is written.
  absl::StatusOr<std::vector<bool>> FindDamaged(std::span<const std::shared_ptr<const Page>> pages,
                                                std::span<const std::span<const uint32_t>> sums);

 private:
  // Tables with the same layout in pinned and in device memory.
  struct Tables {
    uint64_t* to = nullptr;      // [pages_max]
    uint32_t* status = nullptr;  // [pages_max]
    uint32_t* sums = nullptr;    // [pages_max, layers, kv_heads]
    size_t bytes = 0;
  };

  PageCheck(Device& device, const DeviceGeometry& geometry, size_t pages_max)
      : device_(device), geometry_(geometry), pages_max_(pages_max) {}
  // Returns the addresses of the tables in memory at `base`.
  Tables TablesAt(uint64_t base) const;
  // Enqueues the copy of the tables, a launch for each page, and the copy of the results.
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
