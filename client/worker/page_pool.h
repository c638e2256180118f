// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdlib>
#include <map>
#include <memory>
#include <new>
#include <vector>

#include "absl/status/statusor.h"
#include "common/mutex.h"
#include "common/page_format.h"

namespace crumb::client {

struct FreeBytes {
  void operator()(std::byte* bytes) const { std::free(bytes); }
};

// Uninitialized memory, aligned to kTileAlignment.
using AlignedBytes = std::unique_ptr<std::byte, FreeBytes>;

// Returns null if there is no memory.
inline AlignedBytes AllocateAligned(size_t bytes) {
  const size_t rounded = (bytes + kTileAlignment - 1) / kTileAlignment * kTileAlignment;
  return AlignedBytes(static_cast<std::byte*>(std::aligned_alloc(kTileAlignment, rounded)));
}

// PagePool allocates pages in this process's memory, up to a bound. It keeps freed blocks for the
// next page of the same size. Blocks may outlive the pool. Thread-safe.
//
// The bound counts blocks in use; up to 64 idle blocks per size come on top of it and are not
// returned to the system.
class PagePool {
 public:
  explicit PagePool(size_t bytes_max) : state_(std::make_shared<State>(bytes_max)) {}

  // Returns `bytes` uninitialized bytes, aligned to kTileAlignment, which return to the pool with
  // the last reference. kResourceExhausted: the bound is reached.
  absl::StatusOr<std::shared_ptr<std::byte>> Allocate(size_t bytes);

  // Returns the bytes of blocks in use, without idle ones.
  size_t used_bytes() const;

 private:
  struct State {
    explicit State(size_t max) : bytes_max(max) {}
    const size_t bytes_max;
    mutable Mutex mutex;
    size_t used_bytes ABSL_GUARDED_BY(mutex) = 0;
    std::map<size_t, std::vector<AlignedBytes>> idle ABSL_GUARDED_BY(mutex);
  };
  static void GiveBack(State& state, std::byte* block, size_t bytes);

  std::shared_ptr<State> state_;
};

}  // namespace crumb::client
