// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <optional>

#include "storage/host/host_state.h"
#include "storage/host_image.h"

// The transfer of host memory from a process to its successor: HandOver in the one, adoption in the
// other.
namespace crumb::storage {

// Adapts options to memory that is to be adopted: the size of slabs, and the bytes to allocate in
// addition.
void LimitToHandedOver(const HandedOverMemory& memory, HostState::Options* options);

struct Adopted {
  uint64_t pages = 0;
  // Pages that did not check, were dropped, or lie in slabs there is no room for.
  uint64_t left_out = 0;
};

// Returns how a fragment that is handed over stands with the tier below; none: leave it out.
using BelowOfAdopted = std::function<std::optional<Below>(const FragmentMeta&)>;

// Serves the pages of a process before from the slabs they are in, which hold at most
// host.bytes_max. Pages that are left out though the tier below lacks them are lost. Call once,
// before other threads see the state, whose slabs are of the image's size.
Adopted Adopt(HostState& state, HandedOverMemory memory, const BelowOfAdopted& below);

// Returns the memory and the index for a successor process. REQUIRES: no process writes to the
// slabs any more.
absl::StatusOr<HandedOverMemory> HandOver(const HostState& state);

}  // namespace crumb::storage
