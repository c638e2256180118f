// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>

// Constants that several tiers share.
namespace crumb::storage {

// Bytes of a page of a small model: sizes the memory of a policy for evicted pages.
inline constexpr uint64_t kTypicalPageBytes = 256 << 10;
// Keys or pages whose places in the index are brought to the processor's cache before they are
// looked up.
inline constexpr size_t kPrefetchAhead = 8;
// Pages that are removed from host memory before the lock is released: some 100 us.
inline constexpr size_t kHostRemovalsPerHold = 512;

}  // namespace crumb::storage
