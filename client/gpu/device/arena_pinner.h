// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <cstddef>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "client/gpu/device/background.h"
#include "client/gpu/device/device.h"
#include "common/mutex.h"
#include "crumb/client.h"

namespace crumb::client {

// PinnedArena holds the memory of one connection to crumbd, pins it step by step, and unpins it on
// destruction.
class PinnedArena {
 public:
  // `device` is borrowed; `memory` may be null.
  PinnedArena(Device& device, std::shared_ptr<const MappedMemory> memory, size_t piece_bytes)
      : device_(device), memory_(std::move(memory)), piece_bytes_(piece_bytes) {}
  PinnedArena(const PinnedArena&) = delete;
  PinnedArena& operator=(const PinnedArena&) = delete;
  ~PinnedArena();

  const MappedMemory* memory() const { return memory_.get(); }
  // Pins piece after piece until `stop` is set. Returns the first error, at which it ends. It skips
  // memory that another user in this process has pinned, because that user will unpin it.
  absl::Status PinAll(const std::atomic<bool>& stop);
  // Returns the ranges pinned so far in ascending order, with adjacent ranges merged.
  std::vector<std::span<const std::byte>> Pinned() const;

  // Cuts copies at the ends of pieces, on their host side: pieces are pinned separately, and a
  // device copies from or to one pinned range at a time.
  std::vector<DeviceCopy> CutToDevice(std::span<const DeviceCopy> copies) const;
  std::vector<DeviceCopy> CutToHost(std::span<const DeviceCopy> copies) const;

 private:
  using Bytes = std::span<const std::byte>;
  // Pins one range piece by piece, and unpins nothing on an error: the destructor does.
  absl::Status PinOne(Bytes bytes, PinAccess access, const std::atomic<bool>& stop);
  // Returns the number of bytes from a host address to the end of its piece.
  size_t ToPieceEnd(uint64_t host) const;
  // Cuts copies whose host address is the member `host`.
  std::vector<DeviceCopy> Cut(std::span<const DeviceCopy> copies, uint64_t DeviceCopy::*host) const;

  Device& device_;
  const std::shared_ptr<const MappedMemory> memory_;
  const size_t piece_bytes_;
  // Guards the pieces, which one thread adds while copies are cut on others.
  mutable Mutex mutex_;
  std::vector<Bytes> pieces_ ABSL_GUARDED_BY(mutex_);
};

// ArenaPinner pins the memory that a connection to crumbd has mapped, once per connection, in the
// background and piece by piece. Copies need not wait for it; they are slower until then.
// Thread-safe.
//
// Pinned: staging memory for reading and writing, slabs for reading. Memory that cannot be pinned,
// because the limit of locked memory is reached, stays usable and slower.
class ArenaPinner {
 public:
  // Both are borrowed; `client` may be null.
  ArenaPinner(Device& device, Client* client, size_t piece_bytes)
      : device_(device), client_(client), piece_bytes_(piece_bytes), background_("crumb-pin") {}
  // Stops at the end of a piece.
  ~ArenaPinner() { stop_.store(true); }

  // Returns the memory of the present connection, to be held while copies from or to it are in
  // flight. Starts to pin it if it is new, and drops that of the connection before.
  std::shared_ptr<const PinnedArena> Use();

  // Blocks until all memory that can be pinned is pinned. kDeadlineExceeded: not within `timeout`.
  absl::Status WaitIdle(Duration timeout) { return background_.WaitIdle(timeout); }

 private:
  Device& device_;
  Client* const client_;
  const size_t piece_bytes_;
  std::atomic<bool> stop_{false};
  Mutex mutex_;
  std::shared_ptr<PinnedArena> arena_ ABSL_GUARDED_BY(mutex_);
  Background background_;
};

}  // namespace crumb::client
