// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <span>
#include <vector>

namespace crumb::client {

// What one connection to crumbd has mapped into this process.
struct MappedMemory {
  std::vector<std::span<const std::byte>> slabs;  // read-only: leased pages lie in them
  std::span<std::byte> staging;                   // reserved slots lie in it; may be empty
};

}  // namespace crumb::client
