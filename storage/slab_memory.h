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

// A description of its own of a slab's file, for reading only, so that the kernel counts who has it
// apart from this process's.
absl::StatusOr<UniqueFd> OpenSlabReader(int fd);

// The host tier's memory: memory files of one size, mapped writable here and sealed, so that
// whoever else maps them can only read. What of them may be used is taken in full: at Open as far
// as it is wished, the rest by Grow. Thread-safe but for Grow, which one thread calls at a time.
class SlabMemory {
 public:
  // Slabs of options.slab_bytes for options.bytes_max, rounded down to whole MiB, of which
  // `first_bytes` are taken now. Huge pages are a wish: a slab gets them whole and at once, or a
  // line is logged. kInvalidArgument: less than 1 MiB; kResourceExhausted: the memory is not there.
  static absl::StatusOr<std::unique_ptr<SlabMemory>> Open(const HostOptions& options,
                                                          uint64_t first_bytes = UINT64_MAX);

  size_t size() const { return slabs_.size(); }
  uint64_t slab_bytes() const { return slab_bytes_; }    // of each file
  uint64_t total_bytes() const { return total_bytes_; }  // once all is taken
  std::byte* data(size_t slab) const { return slabs_[slab].mapping.data(); }
  // Descriptors stay this object's.
  std::vector<Slab> slabs() const;

  // Another descriptor of a slab, for reading only: what readers of some slabs but not all are
  // sent.
  absl::StatusOr<UniqueFd> OpenReader(size_t slab) const;
  // Whether a descriptor of OpenReader, or a mapping made of it, is anywhere. kUnimplemented: this
  // kernel cannot tell.
  absl::StatusOr<bool> HasReaders(size_t slab) const;

  // The next calls' own: bytes from the start of a slab that are there, and bytes still missing.
  uint64_t bytes(size_t slab) const { return slabs_[slab].taken_bytes; }
  uint64_t missing_bytes() const;

  // Takes up to `bytes`, whole MiB, of the first slab that is not there in full, and returns which
  // one that is. kResourceExhausted: the memory is not there; kOutOfRange: nothing is missing.
  absl::StatusOr<size_t> Grow(uint64_t bytes);

 private:
  struct Memory {
    UniqueFd fd;
    UniqueFd probe;  // made by OpenReader, this object's own
    Mapping mapping;
    uint64_t taken_bytes = 0;
    uint64_t wanted_bytes = 0;  // of the file's
  };

  absl::Status AddSlab(uint64_t wanted_bytes, bool huge_pages);

  uint64_t slab_bytes_ = 0;
  uint64_t total_bytes_ = 0;
  std::vector<Memory> slabs_;
};

}  // namespace crumb::storage
