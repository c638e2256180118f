// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "common/fragment_header.h"
#include "common/page_key.h"
#include "crumb/acquire.h"

namespace crumb::client {

// Room for one fragment in the session's staging memory: write the tiles, then the encoded header,
// then Commit it. Destroying it uncommitted gives the room back. Move-only.
class StagingSlot {
 public:
  // `hold` keeps the memory mapped and gives the room back when its last reference goes.
  StagingSlot(std::span<std::byte> bytes, uint64_t offset, std::shared_ptr<void> hold)
      : bytes_(bytes), offset_(offset), hold_(std::move(hold)) {}
  StagingSlot(StagingSlot&&) = default;
  StagingSlot& operator=(StagingSlot&&) = default;

  // Of the size that was asked for, at a multiple of 512.
  std::span<std::byte> bytes() const { return bytes_; }
  uint64_t offset() const { return offset_; }
  const std::shared_ptr<void>& hold() const { return hold_; }

 private:
  std::span<std::byte> bytes_;
  uint64_t offset_;
  std::shared_ptr<void> hold_;
};

// Pages that will be committed: until they are, or for a while, others who ask for them are told
// MissReason::kPending.
struct PendingPages {
  KeyspaceId keyspace;
  std::vector<PageKey> keys;
};

// What became of a committed fragment. Values are those of the wire.
enum class CommitOutcome {
  kUnknown = 0,
  kStored = 1,
  kDeduplicated = 2,  // the tiles were there already
  kRefused = 3,       // header, sums, keyspace or size are wrong
  kNoRoom = 4,        // every tier is full of leased pages
};

// A fragment that travels as bytes: for callers without shared memory.
struct FragmentBytes {
  int page = 0;                // Get: index into the keys
  Tier tier = Tier::kUnknown;  // Get: where it was found
  FragmentHeader header;
  std::string tiles;  // layer by layer, head by head
};

// Takes the fragments that Get reads, one by one, each checked against key, keyspace and sums. An
// error ends the Get and is returned by it.
using FragmentReceiver = std::function<absl::Status(FragmentBytes fragment)>;

// What one connection to crumbd has mapped into this process.
struct MappedMemory {
  std::vector<std::span<const std::byte>> slabs;  // read-only: leased pages lie in them
  std::span<std::byte> staging;                   // reserved slots lie in it; may be empty
};

}  // namespace crumb::client
