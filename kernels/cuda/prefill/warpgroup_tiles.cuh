// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "kernels/cuda/prefill/warpgroup.cuh"

// The ring of tiles as they are stored, in steps of one or two tiles. One warp copies whole tiles,
// K and V together; all eight producer warps read them.
//
// A slot is filled by TileCopier, which arrives on its full barrier through the bulk copies; each
// producer thread waits for that, reads its part and arrives on the slot's free barrier.
namespace crumb::kernels::cuda::prefill {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

template <class T>
__device__ __forceinline__ int PageSteps(const Block<T>& block) {
  constexpr int kStepTiles = WarpgroupTraits<T>::kStepTiles;
  return (block.pages + kStepTiles - 1) / kStepTiles;
}

// A producer warp's place in the ring of stored tiles: a warp waits for the tiles of a step, reads
// its part and releases them. Each slot holds the tiles of a step.
template <class T>
class TileReader {
  using U = WarpgroupTraits<T>;

 public:
  __device__ __forceinline__ TileReader(const Block<T>& block, WgmmaShared<T>& shared,
                                        WgmmaBarriers<T>& barriers)
      : pages_(block.pages),
        slots_(ptx::SharedAddress(shared.tiles[0].bytes[0])),
        full_(ptx::SharedAddress(&barriers.tile[0])),
        free_(ptx::SharedAddress(&barriers.tile_free[0])) {}

  // Waits for the tiles of the next step and sets their addresses. A tile behind the last one is
  // the last one again.
  __device__ __forceinline__ void Wait(uint32_t (&tile)[U::kStepTiles]) {
    ptx::WaitBarrier(full_ + 8 * slot_, parity_);
    tile[0] = slots_ + slot_ * static_cast<uint32_t>(sizeof(StoredTiles<T>));
    if constexpr (U::kStepTiles == 2) tile[1] = tile[0] + (pages_ > 1 ? T::kTileBytes : 0);
    pages_ -= U::kStepTiles;
  }

  // Releases the tiles of the last Wait. Every lane of the warp calls it after its last read and
  // arrives for itself.
  __device__ __forceinline__ void Release() {
    ptx::Arrive(free_ + 8 * slot_, 1);
    if (++slot_ == U::kSlots) {
      slot_ = 0;
      parity_ ^= 1;
    }
  }

 private:
  int pages_;  // pages that are left before the next Wait
  const uint32_t slots_, full_, free_;
  uint32_t slot_ = 0, parity_ = 0;
};

// Copies stored tiles into the ring, in one of the producer warps. Lane l has the address of the
// tile l behind the last multiple of 32 and copies it.
template <class T>
class TileCopier {
  using U = WarpgroupTraits<T>;

 public:
  __device__ __forceinline__ TileCopier(const PrefillAttentionParams& p, const Block<T>& block,
                                        WgmmaShared<T>& shared, WgmmaBarriers<T>& barriers)
      : table_(p.page_address + static_cast<int64_t>(block.sequence) * p.shape.max_pages),
        offset_(p.page_layer_offset + block.head * p.page_head_stride),
        pages_(block.pages),
        slots_(ptx::SharedAddress(shared.tiles[0].bytes[0])),
        full_(ptx::SharedAddress(&barriers.tile[0])),
        free_(ptx::SharedAddress(&barriers.tile_free[0])) {}

  // Fills the ring.
  __device__ __forceinline__ void Fill() {
    for (int i = 0; i < U::kSlots && next_ < pages_; ++i) Copy();
    parity_ = 0;
  }

  // Refills the oldest slot when all producer warps have read it.
  __device__ __forceinline__ void Refill() {
    if (next_ >= pages_) return;
    ptx::WaitBarrier(free_ + 8 * slot_, parity_);
    Copy();
  }

 private:
  // Starts copying the tiles of the next step into the next slot.
  __device__ __forceinline__ void Copy() {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    static_assert(32 % U::kStepTiles == 0);
    if (next_ % 32 == 0 && next_ + lane < pages_) address_ = table_[next_ + lane] + offset_;
    const uint32_t barrier = full_ + 8 * slot_;
    const int tile = lane - next_ % 32, tiles = min(U::kStepTiles, pages_ - next_);
    if (tile == 0) ptx::ArriveExpecting(barrier, tiles * T::kTileBytes);
    __syncwarp();
    if (tile >= 0 && tile < tiles) {
      ptx::CopyBulkShared(
          slots_ + slot_ * static_cast<uint32_t>(sizeof(StoredTiles<T>)) + tile * T::kTileBytes,
          address_, T::kTileBytes, barrier);
    }
    next_ += U::kStepTiles;
    if (++slot_ == U::kSlots) {
      slot_ = 0;
      parity_ ^= 1;
    }
  }

  const uint64_t* const table_;
  const uint64_t offset_;
  const int pages_;
  const uint32_t slots_, full_, free_;
  int next_ = 0;  // tile
  uint32_t slot_ = 0, parity_ = 0;
  uint64_t address_ = 0;
};

#endif

}  // namespace crumb::kernels::cuda::prefill
