// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <map>
#include <memory>

#include "absl/status/statusor.h"
#include "client/gpu/device/owned.h"
#include "common/mutex.h"

namespace crumb::client {

// PinnedHeap cuts blocks of any size out of one piece of pinned host memory, to and from which a
// device copies asynchronously. Pinning takes about a second for each few GiB, so that all of it is
// pinned once. Blocks keep the memory and its device alive. Thread-safe.
//
// First fit over a list of free pieces that are merged with their neighbours when they return; with
// pages of few sizes little is lost to gaps.
class PinnedHeap {
 public:
  // kResourceExhausted: that much memory cannot be pinned.
  static absl::StatusOr<std::unique_ptr<PinnedHeap>> Create(std::shared_ptr<Device> device,
                                                            size_t bytes);

  // Returns `bytes` uninitialized bytes, aligned to kTileAlignment, which return to the heap with
  // the last reference. kResourceExhausted: no free piece is that large.
  absl::StatusOr<std::shared_ptr<std::byte>> Allocate(size_t bytes);

 private:
  struct State {
    std::shared_ptr<Device> device;  // outlives `memory`
    PinnedBuffer memory;
    size_t bytes = 0;
    Mutex mutex;
    std::map<size_t, size_t> free ABSL_GUARDED_BY(mutex);  // offset and size of free pieces
  };
  explicit PinnedHeap(std::shared_ptr<State> state) : state_(std::move(state)) {}
  // Returns a block to the free pieces and merges it with its neighbours.
  static void GiveBack(State& state, size_t offset, size_t bytes);

  const std::shared_ptr<State> state_;
};

}  // namespace crumb::client
