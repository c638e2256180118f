// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/cpu/cpu_backend.h"
#include "client/worker/page.h"
#include "crumb/transfer.h"

namespace crumb::client {

// HostCache is an engine's cache in host memory, as the pages of its sequences: one of rows
// (PagedCache) or one of INT2 blocks (BlockCache). Loads and stores of pages use it tile by tile.
// Thread-safe for calls that have no block in common.
class HostCache {
 public:
  virtual ~HostCache() = default;

  // Checks that a sequence's block table has the blocks of pages [first_page, end_page) and that
  // they lie in the cache. kInvalidArgument.
  virtual absl::Status CheckBlocks(std::span<const int64_t> blocks, int first_page,
                                   int end_page) const = 0;

  // kFailedPrecondition: the cache has no history pages of this format.
  virtual absl::Status CheckFormat(kernels::PageFormat format) const = 0;

  // Whether the engine computed the rows of page `number` over INT2 history of its own.
  virtual bool ComputedOverInt2(int number) const = 0;

  // Writes the tile of one (layer, KV head) of `page`, whose position is set, to the page's blocks.
  // REQUIRES: CheckBlocks has passed for the page.
  virtual void LoadTile(const Page& page, int layer, int head,
                        std::span<const int64_t> blocks) const = 0;
  // Fills the tile of one (layer, KV head) of `page` from its blocks. Returns kernels::kStatus
  // bits.
  virtual uint32_t StoreTile(std::span<const int64_t> blocks, int layer, int head,
                             const Page& page) const = 0;
};

// A cache of BF16 rows. `options` and `backend` are borrowed. kInvalidArgument.
absl::StatusOr<std::shared_ptr<const HostCache>> NewPagedHostCache(PagedCache cache,
                                                                   const WorkerOptions& options,
                                                                   const CpuBackend& backend);
// A cache of INT2 tiles.
absl::StatusOr<std::shared_ptr<const HostCache>> NewBlockHostCache(BlockCache cache,
                                                                   const WorkerOptions& options,
                                                                   const CpuBackend& backend);

}  // namespace crumb::client
