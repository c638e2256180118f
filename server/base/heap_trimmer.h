// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace crumb::server {

// Memory that the C library's allocator has taken from the kernel, in bytes.
struct HeapBytes {
  uint64_t used = 0;  // bytes that crumbd uses
  uint64_t free = 0;  // freed by crumbd and kept by the allocator for later
};

// Reads the allocator's own counters (mallinfo2), mapped blocks included.
HeapBytes ReadHeapBytes();

// Returns freed memory to the kernel. The allocator itself returns only memory at the end of its
// heap, so after a burst of large messages crumbd's resident memory would never shrink. A trim
// walks all freed blocks while other threads that allocate wait, so it is done only after many
// bytes were freed since the last one. Not thread-safe.
class HeapTrimmer {
 public:
  // `freed_bytes_min`: bytes freed since the last trim that make another worth its cost.
  explicit HeapTrimmer(uint64_t freed_bytes_min) : freed_bytes_min_(freed_bytes_min) {}

  // Trims if enough bytes were freed. Other threads that allocate may wait meanwhile.
  void TrimIfWorthwhile();

 private:
  const uint64_t freed_bytes_min_;
  // Free bytes that a trim has seen already. They stay free for the allocator, without memory.
  uint64_t trimmed_bytes_ = 0;
};

}  // namespace crumb::server
