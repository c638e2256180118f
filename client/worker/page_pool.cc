// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "client/worker/page_pool.h"

#include <string>
#include <utility>

namespace crumb::client {
namespace {

// Number of idle blocks kept per size: enough for a few windows, so that a busy worker rarely
// allocates and an idle one holds little.
constexpr size_t kIdleBlocksMax = 64;

}  // namespace

absl::StatusOr<std::shared_ptr<std::byte>> PagePool::Allocate(size_t bytes) {
  AlignedBytes block;
  {
    MutexLock lock(&state_->mutex);
    if (state_->used_bytes + bytes > state_->bytes_max) {
      return absl::ResourceExhaustedError("pages hold " + std::to_string(state_->used_bytes) +
                                          " bytes, page_bytes_max is " +
                                          std::to_string(state_->bytes_max));
    }
    state_->used_bytes += bytes;
    std::vector<AlignedBytes>& idle = state_->idle[bytes];
    if (!idle.empty()) {
      block = std::move(idle.back());
      idle.pop_back();
    }
  }
  if (block == nullptr) block = AllocateAligned(bytes);
  if (block == nullptr) {
    MutexLock lock(&state_->mutex);
    state_->used_bytes -= bytes;
    return absl::ResourceExhaustedError("no memory for a page of " + std::to_string(bytes) +
                                        " bytes");
  }
  return std::shared_ptr<std::byte>(block.release(), [state = state_, bytes](std::byte* freed) {
    GiveBack(*state, freed, bytes);
  });
}

void PagePool::GiveBack(State& state, std::byte* block, size_t bytes) {
  AlignedBytes freed(block);
  MutexLock lock(&state.mutex);
  state.used_bytes -= bytes;
  std::vector<AlignedBytes>& idle = state.idle[bytes];
  if (idle.size() < kIdleBlocksMax) idle.push_back(std::move(freed));
}

size_t PagePool::used_bytes() const {
  MutexLock lock(&state_->mutex);
  return state_->used_bytes;
}

}  // namespace crumb::client
