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

// The memory of one connection to crumbd, pinned as far as that has come. Unpins it in the end.
class PinnedArena {
 public:
  // `device` is borrowed; `memory` may be null.
  PinnedArena(Device& device, std::shared_ptr<const MappedMemory> memory, size_t piece_bytes)
      : device_(device), memory_(std::move(memory)), piece_bytes_(piece_bytes) {}
  PinnedArena(const PinnedArena&) = delete;
  PinnedArena& operator=(const PinnedArena&) = delete;
  ~PinnedArena();

  const MappedMemory* memory() const { return memory_.get(); }
  // Pins piece after piece, until `stop`. A piece that cannot be pinned ends it: the first error.
  // What somebody else of this process has pinned is left out: it ends when that one ends.
  absl::Status PinAll(const std::atomic<bool>& stop);
  size_t pinned_bytes() const { return pinned_bytes_.load(); }
  // What this has pinned so far, from the lowest address on, neighbours in one.
  std::vector<std::span<const std::byte>> Pinned() const;

  // The same copies, none of whose host sides crosses the end of a piece: pieces are pinned apart,
  // and a device copies from or to one at a time.
  std::vector<DeviceCopy> CutToDevice(std::span<const DeviceCopy> copies) const;
  std::vector<DeviceCopy> CutToHost(std::span<const DeviceCopy> copies) const;

 private:
  using Bytes = std::span<const std::byte>;
  absl::Status PinOne(Bytes bytes, PinAccess access, const std::atomic<bool>& stop);
  // Bytes from a host address to the end of its piece.
  size_t ToPieceEnd(uint64_t host) const;
  std::vector<DeviceCopy> Cut(std::span<const DeviceCopy> copies, uint64_t DeviceCopy::*host) const;

  Device& device_;
  const std::shared_ptr<const MappedMemory> memory_;
  const size_t piece_bytes_;
  mutable Mutex mutex_;
  std::vector<Bytes> pieces_ ABSL_GUARDED_BY(mutex_);
  std::atomic<size_t> pinned_bytes_{0};
};

// Pins what crumbd's connection has mapped: once for each connection, in the background and in
// pieces. Copies need not wait for it: they are slower before. Thread-safe.
class ArenaPinner {
 public:
  // Both borrowed; `client` may be null.
  ArenaPinner(Device& device, Client* client, size_t piece_bytes)
      : device_(device), client_(client), piece_bytes_(piece_bytes), background_("crumb-pin") {}
  // Stops at the end of a piece.
  ~ArenaPinner() { stop_.store(true); }

  // The memory of the connection that is there now, to be held while copies from or to it are under
  // way. Begins to pin it when it is new, and lets go of the one before.
  std::shared_ptr<const PinnedArena> Use();

  // Waits until everything is pinned that can be. kDeadlineExceeded.
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
