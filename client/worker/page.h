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

// 64 tokens of one sequence, this rank's layers and KV heads, where attention reads them: in memory
// of this process, in crumbd's slabs under a lease, or in device memory. Immutable once its last
// tile is written.
struct Page {
  PageKey key;
  PageKey parent;         // zeros: the first page of a sequence
  uint32_t position = 0;  // in its sequence
  // The keyspace's generation when the page was fetched or begun; 0 if crumbd does not know the
  // keyspace. A drop raises it, and sequences that begin later share no page of a lower one.
  uint64_t generation = 0;
  kernels::PageFormat format = kernels::PageFormat::kInt2;
  bool over_int2_prefix = false;  // its rows were computed while INT2 pages were attended
  bool finite = true;             // false: held a non-finite row; never leaves the sequence
  bool placed = false;            // fetched, and attended where it lies: nothing is to be copied
  bool in_pool = false;           // fetched, in a device pool: kernels read it where it is mapped
  std::byte* tiles = nullptr;     // the first layer's; in each layer head by head
  size_t tile_bytes = 0;
  size_t layer_stride = 0;       // bytes; other ranks' tiles may lie between layers
  size_t bytes = 0;              // of this rank's tiles; those of a page made here are contiguous
  std::shared_ptr<void> memory;  // keeps `tiles` where they are
  // CRC-32C of a page that comes from elsewhere or was evicted on a device, layer by layer, head by
  // head. None of a placed one.
  std::vector<uint32_t> tile_sums;
  // The same of a page that lies in one fragment, where `memory` keeps them; else empty.
  std::span<const uint32_t> fragment_sums;
  std::shared_ptr<DeferredChecksums> deferred_checksums;  // not null: `sums` are those of the first
                                                          // layers, until it brings all

  std::span<const uint32_t> sums() const {
    return fragment_sums.empty() ? std::span(tile_sums) : fragment_sums;
  }
  std::byte* layer(int index) const { return tiles + layer_stride * index; }
};

// Makes what a fetched prefix has one of for each page, in runs: a run is one piece of memory and
// goes with its last reference. One thread at a time makes them.
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
