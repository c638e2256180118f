// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "client/gpu/device/arena_pinner.h"

#include <algorithm>
#include <utility>

#include "common/logging.h"
#include "common/status_macros.h"

namespace crumb::client {

PinnedArena::~PinnedArena() {
  MutexLock lock(&mutex_);
  for (const Bytes& piece : pieces_) device_.Unpin(piece);
}

absl::Status PinnedArena::PinOne(Bytes bytes, PinAccess access, const std::atomic<bool>& stop) {
  for (size_t at = 0; at < bytes.size() && !stop.load(); at += piece_bytes_) {
    const Bytes piece = bytes.subspan(at, std::min(piece_bytes_, bytes.size() - at));
    const absl::Status pinned = device_.Pin(piece, access);
    if (absl::IsAlreadyExists(pinned)) continue;
    CRUMB_RETURN_IF_ERROR(pinned);
    MutexLock lock(&mutex_);
    pieces_.push_back(piece);
  }
  return absl::OkStatus();
}

absl::Status PinnedArena::PinAll(const std::atomic<bool>& stop) {
  if (memory_ == nullptr) return absl::OkStatus();
  // Staging memory is the smallest part and used most.
  CRUMB_RETURN_IF_ERROR(PinOne(memory_->staging, PinAccess::kReadWrite, stop));
  for (const Bytes& slab : memory_->slabs) {
    CRUMB_RETURN_IF_ERROR(PinOne(slab, PinAccess::kRead, stop));
  }
  return absl::OkStatus();
}

std::vector<std::span<const std::byte>> PinnedArena::Pinned() const {
  std::vector<Bytes> pieces;
  {
    MutexLock lock(&mutex_);
    pieces = pieces_;
  }
  std::sort(pieces.begin(), pieces.end(),
            [](const Bytes& a, const Bytes& b) { return a.data() < b.data(); });
  std::vector<Bytes> ranges;
  for (const Bytes& piece : pieces) {
    if (!ranges.empty() && ranges.back().data() + ranges.back().size() == piece.data()) {
      ranges.back() = {ranges.back().data(), ranges.back().size() + piece.size()};
    } else {
      ranges.push_back(piece);
    }
  }
  return ranges;
}

size_t PinnedArena::ToPieceEnd(uint64_t host) const {
  const auto rest = [&](Bytes bytes) -> size_t {
    const auto begin = reinterpret_cast<uint64_t>(bytes.data());
    if (host < begin || host >= begin + bytes.size()) return 0;
    return piece_bytes_ - (host - begin) % piece_bytes_;
  };
  if (memory_ == nullptr) return SIZE_MAX;
  if (const size_t left = rest(memory_->staging); left > 0) return left;
  for (const Bytes& slab : memory_->slabs) {
    if (const size_t left = rest(slab); left > 0) return left;
  }
  return SIZE_MAX;
}

std::vector<DeviceCopy> PinnedArena::Cut(std::span<const DeviceCopy> copies,
                                         uint64_t DeviceCopy::*host) const {
  std::vector<DeviceCopy> cut;
  cut.reserve(copies.size());
  for (DeviceCopy copy : copies) {
    while (copy.bytes > 0) {
      DeviceCopy part = copy;
      part.bytes = std::min(copy.bytes, ToPieceEnd(copy.*host));
      cut.push_back(part);
      copy.to += part.bytes;
      copy.from += part.bytes;
      copy.bytes -= part.bytes;
    }
  }
  return cut;
}

std::vector<DeviceCopy> PinnedArena::CutToDevice(std::span<const DeviceCopy> copies) const {
  return Cut(copies, &DeviceCopy::from);
}

std::vector<DeviceCopy> PinnedArena::CutToHost(std::span<const DeviceCopy> copies) const {
  return Cut(copies, &DeviceCopy::to);
}

std::shared_ptr<const PinnedArena> ArenaPinner::Use() {
  std::shared_ptr<const MappedMemory> memory = client_ == nullptr ? nullptr : client_->mapped();
  std::shared_ptr<PinnedArena> before;  // destroyed, and unpinned, outside the lock
  MutexLock lock(&mutex_);
  // Without a connection, the old memory is still read under leases.
  if (arena_ == nullptr || (memory != nullptr && memory.get() != arena_->memory())) {
    before = std::exchange(arena_,
                           std::make_shared<PinnedArena>(device_, std::move(memory), piece_bytes_));
    if (arena_->memory() != nullptr) {
      background_.Add([this, arena = arena_] {
        const absl::Status pinned = arena->PinAll(stop_);
        if (!pinned.ok()) {
          LogWarning("crumbd's memory is not all pinned, copies of it are slower: {}",
                     pinned.ToString());
        }
      });
    }
  }
  return arena_;
}

}  // namespace crumb::client
