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

namespace crumb::client {

// Brings pages from where sequences read them to where crumbd takes them. Thread-safe.
class PageReader {
 public:
  virtual ~PageReader() = default;

  // Copies the tiles of pages made here to `to`, page->bytes each, and answers the sums of each
  // page's tiles. Blocks until all is there. Any error: nothing of it may be used.
  virtual absl::StatusOr<std::vector<std::vector<uint32_t>>> Read(
      std::span<const std::shared_ptr<const Page>> pages, std::span<std::byte* const> to) = 0;
};

// Pages in this process's memory. The sums come from the same pass that copies, so they are of the
// bytes that crumbd will read.
class HostPageReader final : public PageReader {
 public:
  absl::StatusOr<std::vector<std::vector<uint32_t>>> Read(
      std::span<const std::shared_ptr<const Page>> pages, std::span<std::byte* const> to) override;
};

}  // namespace crumb::client
