// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

// How much of an SSD folder's budget its index may take, and how the rest keeps it there.
namespace crumb::storage {

// Each buffer gets one part in so many of the index's bytes: RocksDB's log, tables and compactions
// stay inside with buffers of that size.
inline constexpr uint64_t kIndexBufferPart = 8;

// Changes of recency or removals in one index write: well below a buffer.
inline constexpr size_t kIndexBatchChangesMax = 4096;

// The index's share of a budget of `bytes_max`: one in so many bytes, within bounds.
inline uint64_t IndexBytes(uint64_t bytes_max) {
  return std::clamp(bytes_max / 32, uint64_t{6} << 20, uint64_t{64} << 20);
}

inline uint64_t IndexBufferBytes(uint64_t bytes_max) {
  return std::min(IndexBytes(bytes_max) / kIndexBufferPart, uint64_t{4} << 20);
}

}  // namespace crumb::storage
