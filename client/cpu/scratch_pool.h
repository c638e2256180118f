// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <utility>
#include <vector>

#include "client/worker/page_pool.h"
#include "common/mutex.h"

namespace crumb::client {

// ScratchPool lends work memory to kernel calls. It keeps as many pieces as were in use at once.
// Thread-safe.
//
// A piece that is too small for a request is freed and replaced, so that pieces grow to the largest
// call. It must outlive its pieces.
class ScratchPool {
 public:
  class Piece {
   public:
    Piece(ScratchPool* pool, AlignedBytes bytes, size_t size)
        : pool_(pool), bytes_(std::move(bytes)), size_(size) {}
    Piece(const Piece&) = delete;
    Piece& operator=(const Piece&) = delete;
    ~Piece() { pool_->GiveBack(std::move(bytes_), size_); }
    std::byte* data() const { return bytes_.get(); }  // null if there is no memory

   private:
    ScratchPool* pool_;
    AlignedBytes bytes_;
    size_t size_;
  };

  // Returns a piece of at least `bytes` bytes, aligned to kTileAlignment, with undefined contents.
  // It returns to the pool when the Piece is destroyed.
  Piece Borrow(size_t bytes) {
    {
      MutexLock lock(&mutex_);
      if (!idle_.empty()) {
        Idle piece = std::move(idle_.back());
        idle_.pop_back();
        if (piece.size >= bytes) return Piece(this, std::move(piece.bytes), piece.size);
      }
    }
    return Piece(this, AllocateAligned(bytes), bytes);
  }

 private:
  struct Idle {
    AlignedBytes bytes;
    size_t size;
  };
  void GiveBack(AlignedBytes bytes, size_t size) {
    if (bytes == nullptr) return;
    MutexLock lock(&mutex_);
    idle_.push_back({std::move(bytes), size});
  }

  Mutex mutex_;
  std::vector<Idle> idle_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace crumb::client
