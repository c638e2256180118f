// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "client/transfer/pinned_heap.h"

#include <iterator>
#include <utility>

#include "client/worker/page_pool.h"
#include "common/status_macros.h"
#include "fmt/format.h"

namespace crumb::client {

absl::StatusOr<std::unique_ptr<PinnedHeap>> PinnedHeap::Create(std::shared_ptr<Device> device,
                                                               size_t bytes) {
  auto state = std::make_shared<State>();
  CRUMB_ASSIGN_OR_RETURN(state->memory, NewPinnedBuffer(*device, bytes));
  state->device = std::move(device);
  state->bytes = bytes;
  if (bytes > 0) {
    MutexLock lock(&state->mutex);
    state->free[0] = bytes;
  }
  return std::unique_ptr<PinnedHeap>(new PinnedHeap(std::move(state)));
}

absl::StatusOr<std::shared_ptr<std::byte>> PinnedHeap::Allocate(size_t bytes) {
  const size_t rounded = (bytes + kTileAlignment - 1) / kTileAlignment * kTileAlignment;
  MutexLock lock(&state_->mutex);
  for (auto piece = state_->free.begin(); piece != state_->free.end(); ++piece) {
    const auto [offset, size] = *piece;
    if (size < rounded) continue;
    state_->free.erase(piece);
    if (size > rounded) state_->free[offset + rounded] = size - rounded;
    return std::shared_ptr<std::byte>(state_->memory.get() + offset,
                                      [state = state_, offset = offset, rounded](std::byte*) {
                                        GiveBack(*state, offset, rounded);
                                      });
  }
  return absl::ResourceExhaustedError(
      fmt::format("pages that wait to be published use up {} bytes of pinned memory: raise "
                  "staging_bytes, or store fewer pages at once",
                  state_->bytes));
}

void PinnedHeap::GiveBack(State& state, size_t offset, size_t bytes) {
  MutexLock lock(&state.mutex);
  const auto after = state.free.upper_bound(offset);
  if (after != state.free.end() && offset + bytes == after->first) {
    bytes += after->second;
    state.free.erase(after);
  }
  const auto next = state.free.upper_bound(offset);
  if (next != state.free.begin()) {
    const auto before = std::prev(next);
    if (before->first + before->second == offset) {
      before->second += bytes;
      return;
    }
  }
  state.free[offset] = bytes;
}

}  // namespace crumb::client
