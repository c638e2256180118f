// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/fragment_header.h"
#include "common/page_key.h"
#include "common/wire_enums.h"
#include "crumb/acquire.h"

namespace crumb::client {

// Room for one fragment in the session's staging memory. The caller writes the tiles, then the
// encoded header, then commits the slot. Destroying a slot that was not committed gives its room
// back. Move-only.
//
//     bytes():  | tiles, layer by layer, head by head | encoded header |
//               0                            tiles_bytes
//
// A slot is bound to the connection that reserved it. crumbd copies the fragment out of it at
// Commit and verifies every checksum of the copy, so that a writer that crashes or overwrites its
// slot damages no page.
class StagingSlot {
 public:
  // `hold` keeps the memory mapped and gives the room back when its last reference goes. `offset`
  // is the slot's place in the session's staging memory, by which crumbd knows it. Client::Reserve
  // constructs slots; tests and other implementations of Client may.
  StagingSlot(std::span<std::byte> bytes, uint64_t offset, std::shared_ptr<void> hold)
      : bytes_(bytes), offset_(offset), hold_(std::move(hold)) {}
  StagingSlot(StagingSlot&&) = default;
  StagingSlot& operator=(StagingSlot&&) = default;

  // The requested number of bytes, aligned to 512.
  std::span<std::byte> bytes() const { return bytes_; }
  uint64_t offset() const { return offset_; }
  const std::shared_ptr<void>& hold() const { return hold_; }

 private:
  std::span<std::byte> bytes_;
  uint64_t offset_;
  std::shared_ptr<void> hold_;
};

// Pages that the caller will commit. Until it does, or for a limited time, other callers that
// request them get MissReason::kPending.
//
// It saves work, not correctness: two processes that compute one page both commit it, and the
// second gets kDeduplicated.
struct PendingPages {
  KeyspaceId keyspace;
  std::vector<PageKey> keys;
};

using crumb::CommitOutcome;

// A Commit that is in flight. Destroying it before Finish abandons the outcomes; crumbd may have
// committed the fragments.
class PendingCommit {
 public:
  virtual ~PendingCommit() = default;
  // Blocks until the response has arrived and returns the result of the Commit. REQUIRES: it is
  // called at most once.
  virtual absl::StatusOr<std::vector<CommitOutcome>> Finish() = 0;
};

// A Commit whose result is known.
class FinishedCommit final : public PendingCommit {
 public:
  explicit FinishedCommit(absl::StatusOr<std::vector<CommitOutcome>> result)
      : result_(std::move(result)) {}
  absl::StatusOr<std::vector<CommitOutcome>> Finish() override { return std::move(result_); }

 private:
  absl::StatusOr<std::vector<CommitOutcome>> result_;
};

// A fragment as bytes, for callers without shared memory.
//
// Tiles have the sizes of docs/formats/page-tile.md and are contiguous. Put takes the checksums in
// header.tile_sums from the caller, Get returns those that it has verified.
struct FragmentBytes {
  int page = 0;                // set by Get: index into the keys
  Tier tier = Tier::kUnknown;  // set by Get: the tier in which it was found
  FragmentHeader header;
  std::string tiles;  // tiles layer by layer, head by head
};

// Receives the fragments that Get reads, one by one; key, keyspace and checksums were verified. Get
// stops at the first error that the receiver returns, and returns it.
using FragmentReceiver = std::function<absl::Status(FragmentBytes fragment)>;

// Memory that one connection to crumbd has mapped into this process.
//
// For DeviceWorker and Transfer, which pin it so that a GPU can copy from it. A slab that crumbd
// grants only when a lease needs it is not in `slabs`.
struct MappedMemory {
  std::vector<std::span<const std::byte>> slabs;  // read-only; leased pages lie in them
  std::span<std::byte> staging;                   // reserved slots lie in it; may be empty
};

}  // namespace crumb::client
