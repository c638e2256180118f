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
// must work on a copy. The Session holds it until it leaves kOpen, and every Piece holds it until
// its commit is done. Thread-safe: one mutex guards the maps, and no byte of staging memory is read
// under it.
//
// Room is used again as soon as it is free, so an offset alone may name another reservation than
// its sender meant. A reservation is therefore named by its offset and the number of the Reserve
// that made it. The number 0 names any.
//
// A reservation:  free --Reserve--> reserved --Take--> committing --~Piece--> free
//                   ^------Abort, GiveUp------'
class StagingArea {
 public:
  // Alignment of offsets, in bytes; reservations take multiples of it.
  static constexpr uint64_t kAlignment = 512;
  // Numbers of Reserves that were given up and are remembered: the highest ones, which are the
  // latest of a process that counts its calls.
  static constexpr size_t kGivenUpMax = 1024;

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
  // `reservations_max` bounds the reservations at one time. Errors are those of creating, sealing
  // and mapping a memory file.
  static absl::StatusOr<std::shared_ptr<StagingArea>> Create(uint64_t bytes,
                                                             size_t reservations_max);

  // Reserves `bytes` in the smallest free piece that has room, in O(log n) of the reservations.
  // Returns false when there is none, or when Reserve `request` was given up. Also returns false if
  // `bytes` is 0 or the maximum of reservations is reached. `offset` is set on true only.
  bool Reserve(uint64_t bytes, uint64_t& offset, uint64_t request = 0);

  // Gives a reservation back. False: there is none, or it is being committed.
  bool Abort(uint64_t offset, uint64_t request = 0);

  // Ends the reservations of Reserve number `request`, except those that are being committed, and
  // refuses later ones of that number. Callers use it if the response may have been lost. Does
  // nothing for 0.
  void GiveUp(uint64_t request);

  // Takes a reservation for a commit. An empty pointer: there is none.
  static std::unique_ptr<Piece> Take(const std::shared_ptr<StagingArea>& area, uint64_t offset,
                                     uint64_t request = 0);

  // Returns the memory file, which the process maps writable. It stays open as long as this object.
  int fd() const { return fd_.get(); }
  // Returns the size in bytes.
  uint64_t size() const { return mapping_.size(); }
  // Returns the number of reservations, those being committed included.
  size_t reservations() const;
  // Returns the bytes without a reservation, which may lie in several pieces.
  uint64_t free_bytes() const;

 private:
  struct Reservation {
    uint64_t bytes = 0;    // requested
    uint64_t request = 0;  // number of the Reserve
    bool committing = false;
  };
  using Reservations = std::map<uint64_t, Reservation>;  // offset -> reservation

  StagingArea(UniqueFd fd, Mapping mapping, size_t reservations_max);
  // Ends a reservation that is being committed; Piece's destructor calls it.
  void Free(uint64_t offset);
  // Ends any reservation, and joins its room with the free pieces before and behind it.
  void FreeLocked(uint64_t offset) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Returns the reservation if it is there and is not being committed, else reserved_.end().
  Reservations::iterator FindLocked(uint64_t offset, uint64_t request)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
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
  // The pieces of free_ sorted by size, to find a fitting one however many are too small.
  std::set<std::pair<uint64_t, uint64_t>> free_by_bytes_ ABSL_GUARDED_BY(mutex_);
  uint64_t free_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  Reservations reserved_ ABSL_GUARDED_BY(mutex_);
  // (request, offset) of the reservations whose Reserve has a number.
  std::set<std::pair<uint64_t, uint64_t>> by_request_ ABSL_GUARDED_BY(mutex_);
  std::set<uint64_t> given_up_ ABSL_GUARDED_BY(mutex_);  // numbers of Reserves
};

}  // namespace crumb::server
