// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/statusor.h"
#include "client/worker/page.h"
#include "common/crc32c.h"

namespace crumb::client {

// PageReader copies pages from the memory where sequences read them to staging memory. Thread-safe.
//
// The publisher uses it: HostPageReader for pages of a CPU worker and of transfers, another one for
// pages in device memory.
class PageReader {
 public:
  virtual ~PageReader() = default;

  // Copies the tiles of pages made by this worker to `to`, page->bytes each, and returns the
  // checksums of each page's tiles. Blocks until all copies are complete. After an error no copy
  // may be used.
  virtual absl::StatusOr<std::vector<std::vector<uint32_t>>> Read(
      std::span<const std::shared_ptr<const Page>> pages, std::span<std::byte* const> to) = 0;
};

// HostPageReader copies pages from this process's memory. It computes the checksums while it
// copies, so that they are those of the bytes that crumbd will read.
class HostPageReader final : public PageReader {
 public:
  absl::StatusOr<std::vector<std::vector<uint32_t>>> Read(
      std::span<const std::shared_ptr<const Page>> pages, std::span<std::byte* const> to) override {
    std::vector<std::vector<uint32_t>> sums(pages.size());
    for (size_t i = 0; i < pages.size(); ++i) {
      const Page& page = *pages[i];
      for (size_t at = 0; at < page.bytes; at += page.tile_bytes) {
        sums[i].push_back(CopyCrc32c(to[i] + at, {page.tiles + at, page.tile_bytes}));
      }
    }
    return sums;
  }
};

}  // namespace crumb::client
