// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/statusor.h"
#include "common/mapping.h"
#include "common/unique_fd.h"
#include "storage/store_options.h"
#include "storage/tiered_store.h"

namespace crumb::storage {

// The host tier's memory: memory files that are there in full from the start, mapped writable here
// and sealed, so that whoever else maps them can only read. Immutable after Open, thread-safe.
class SlabMemory {
 public:
  // Takes options.bytes_max, rounded down to whole MiB, in slabs of options.slab_bytes and a
  // smaller last one. Huge pages are a wish: without them a line is logged. kInvalidArgument: less
  // than 1 MiB; kResourceExhausted: the memory is not there.
  static absl::StatusOr<std::unique_ptr<SlabMemory>> Open(const HostOptions& options);

  size_t size() const { return slabs_.size(); }
  uint64_t bytes(size_t slab) const { return slabs_[slab].mapping.size(); }
  std::byte* data(size_t slab) const { return slabs_[slab].mapping.data(); }
  // Descriptors stay this object's.
  std::vector<Slab> slabs() const;

 private:
  struct Memory {
    UniqueFd fd;
    Mapping mapping;
  };

  static absl::StatusOr<Memory> OpenSlab(size_t number, uint64_t bytes, bool huge_pages);

  std::vector<Memory> slabs_;
};

}  // namespace crumb::storage
