// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdlib>
#include <memory>
#include <new>

namespace crumb::client {

struct FreeBytes {
  void operator()(std::byte* bytes) const { std::free(bytes); }
};

// Uninitialised memory at a multiple of kTileAlignment.
using AlignedBytes = std::unique_ptr<std::byte, FreeBytes>;

inline constexpr size_t kTileAlignment = 128;

// Null when there is no memory.
inline AlignedBytes AllocateAligned(size_t bytes) {
  const size_t rounded = (bytes + kTileAlignment - 1) / kTileAlignment * kTileAlignment;
  return AlignedBytes(static_cast<std::byte*>(std::aligned_alloc(kTileAlignment, rounded)));
}

}  // namespace crumb::client
