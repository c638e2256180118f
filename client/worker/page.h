// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "common/page_key.h"
#include "common/placement.h"
#include "kernels/tile.h"

namespace crumb::client {

class DeferredChecksums;

// Page is one page (64 tokens of one sequence, this rank's layers and KV heads) where attention
// reads it: in this process's memory, in crumbd's slabs under a lease, or in device memory.
// Immutable once its last tile is written.
//
// Who writes a page, and where its checksums are:
//     evicted or appended here   this process's memory, a slot     tile_sums, of devices only
//     fetched, one fragment      crumbd's slab, under a lease      fragment_sums or tile_sums
//     fetched, several fragments copied to this process's memory   tile_sums
struct Page {
  PageKey key;
  PageKey parent;         // zeros for the first page of a sequence
  uint32_t position = 0;  // index in its sequence
  // The keyspace's generation when the page was fetched or begun; 0 if crumbd does not know the
  // keyspace. Sequences use only pages of their own generation.
  uint64_t generation = 0;
  kernels::PageFormat format = kernels::PageFormat::kInt2;
  bool over_int2_prefix = false;  // its rows were computed while INT2 pages were attended
  bool finite = true;             // false: it has a non-finite row and is never published
  bool placed = false;            // fetched, and attended in place without a copy
  bool in_pool = false;        // fetched, and mapped from a device pool, where kernels can read it
  std::byte* tiles = nullptr;  // the first layer's tiles, head by head
  size_t tile_bytes = 0;
  size_t layer_stride = 0;  // in bytes; other ranks' tiles may lie between layers
  size_t bytes = 0;         // size of this rank's tiles, which are contiguous in a page made here
  std::shared_ptr<void> memory;  // owns the memory at `tiles`
  // CRC-32C of every tile, layer by layer, head by head, of a page that was fetched or evicted on a
  // device. Empty if the page is placed.
  std::vector<uint32_t> tile_sums;
  // Checksums of a page in one fragment, in memory that `memory` owns; otherwise empty.
  std::span<const uint32_t> fragment_sums;
  // If not null: sums() has the checksums of the first layers only, and this fetches the others.
  std::shared_ptr<DeferredChecksums> deferred_checksums;

  std::span<const uint32_t> sums() const {
    return fragment_sums.empty() ? std::span(tile_sums) : fragment_sums;
  }
  std::byte* layer(int index) const { return tiles + layer_stride * index; }
};

// RunAllocator creates the objects of a fetched prefix, one per page, in blocks of kRunPages: the
// objects of a block have one allocation and one owner count. Not thread-safe.
template <typename T>
class RunAllocator {
 public:
  std::shared_ptr<T> New() {
    if (run_ == nullptr || run_->size() == kRunPages) {
      run_ = std::make_shared<std::vector<T>>();
      run_->reserve(kRunPages);
    }
    T& made = run_->emplace_back();
    return {run_, &made};
  }

 private:
  std::shared_ptr<std::vector<T>> run_;
};

}  // namespace crumb::client
