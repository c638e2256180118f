// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <span>
#include <utility>

#include "absl/status/statusor.h"
#include "common/mapping.h"
#include "common/mutex.h"
#include "common/unique_fd.h"

namespace crumb::server {

// A session's staging memory: a memory file that the worker writes fragments into and crumbd only
// reads, and the reservations cut from it. The worker may change the bytes at any time, so readers
// must work on a copy. Thread-safe.
class StagingArea {
 public:
  static constexpr uint64_t kAlignment = 512;

  // A reserved piece that is being committed; free again when this goes.
  class Piece {
   public:
    Piece(std::shared_ptr<StagingArea> area, uint64_t offset, uint64_t bytes)
        : area_(std::move(area)), offset_(offset), bytes_(bytes) {}
    Piece(const Piece&) = delete;
    Piece& operator=(const Piece&) = delete;
    ~Piece() { area_->Free(offset_); }

    std::span<const std::byte> bytes() const {
      return {area_->mapping_.data() + offset_, static_cast<size_t>(bytes_)};
    }

   private:
    const std::shared_ptr<StagingArea> area_;
    const uint64_t offset_;
    const uint64_t bytes_;
  };

  // `bytes` is a multiple of kAlignment and not 0. The file cannot change its size any more.
  static absl::StatusOr<std::shared_ptr<StagingArea>> Create(uint64_t bytes,
                                                             size_t reservations_max);

  // Reserves `bytes` in the smallest free piece that has room, in O(log n) of the reservations.
  // Returns false when there is none.
  bool Reserve(uint64_t bytes, uint64_t& offset);

  // Gives a reservation back. False: `offset` is none, or is being committed.
  bool Abort(uint64_t offset);

  // Takes a reservation for a commit. An empty pointer: `offset` is none.
  static std::unique_ptr<Piece> Take(const std::shared_ptr<StagingArea>& area, uint64_t offset);

  int fd() const { return fd_.get(); }
  uint64_t size() const { return mapping_.size(); }
  // Reservations, those being committed included.
  size_t reservations() const;
  uint64_t free_bytes() const;

 private:
  struct Reservation {
    uint64_t bytes = 0;  // asked for
    bool committing = false;
  };

  StagingArea(UniqueFd fd, Mapping mapping, size_t reservations_max);
  void Free(uint64_t offset);
  void FreeLocked(uint64_t offset) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  using FreePieces = std::map<uint64_t, uint64_t>;  // offset -> bytes
  void AddFreeLocked(uint64_t offset, uint64_t bytes) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Returns the piece behind it.
  FreePieces::iterator RemoveFreeLocked(FreePieces::iterator piece)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const UniqueFd fd_;
  const Mapping mapping_;
  const size_t reservations_max_;
  mutable Mutex mutex_;
  FreePieces free_ ABSL_GUARDED_BY(mutex_);  // never adjacent
  // The same pieces by size, so that a fitting one is found however many are too small.
  std::set<std::pair<uint64_t, uint64_t>> free_by_bytes_ ABSL_GUARDED_BY(mutex_);
  uint64_t free_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  std::map<uint64_t, Reservation> reserved_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace crumb::server
