// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include "kernels/cuda/common/ptx.cuh"
#include "models/cuda/product_chain.h"

// The schedule of MultiplyChain (product_chain.h), and the part of it that streams weights.
//
// 1. Each block computes a range of the outputs of every product (WorkRange). A tile is up to eight
//    rows of W; its channels are cut into pieces of at most kPieceMax.
// 2. Four stream warps (Stream) copy the pieces of all products, in order, into a ring of slots in
//    shared memory (Ring), with one cp.async.bulk per row of W. They begin before the previous
//    kernel has ended and do not stop between products, so that the memory is never idle.
// 3. Two groups of eight consumer warps (Consumer in product_chain.cu) take pieces in turn. The
//    warps of a group divide the channels of a piece and multiply with mma.sync: rows of x are its
//    rows, rows of W its columns. Channels may have any order as long as both operands agree, so a
//    lane loads 16 contiguous bytes of each.
// 4. The partial sums of a tile are added up by one warp, after it has multiplied another tile.
// 5. Between products, blocks wait for one another (Consumer::Arrive, Wait); streams continue.
namespace crumb::models::cuda::ptx {

using namespace kernels::cuda::ptx;  // NOLINT: one name for all instructions

// Like SyncThreads, for threads that do not wait.
__device__ __forceinline__ void ArriveThreads(int barrier, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// Loads `p`; later reads see all writes that other blocks made before they added to it.
__device__ __forceinline__ uint32_t LoadAcquire(const uint32_t* p) {
  uint32_t x;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(x) : "l"(p) : "memory");
  return x;
}

// The multiprocessor's clock.
__device__ __forceinline__ uint32_t Cycles() {
  uint32_t cycles;
  asm volatile("mov.u32 %0, %%clock;" : "=r"(cycles)::"memory");
  return cycles;
}

// Like WaitBarrier, but may return early. Returns whether the phase of this parity is over.
__device__ __forceinline__ bool TryWaitBarrier(uint32_t barrier, uint32_t parity) {
  uint32_t over;
  asm volatile(
      "{\n .reg .pred p;\n"
      " mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
      " selp.u32 %0, 1, 0, p;\n}"
      : "=r"(over)
      : "r"(barrier), "r"(parity)
      : "memory");
  return over != 0;
}

// Adds to a counter in device memory, after everything that the block wrote before a barrier.
__device__ __forceinline__ uint32_t AddReleaseAcquire(uint32_t* p, uint32_t x) {
  uint32_t old;
  asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], %2;"
               : "=r"(old)
               : "l"(p), "r"(x)
               : "memory");
  return old;
}

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
// Returns true for one lane of a converged warp. The compiler knows this, so that a bulk copy of
// this lane takes one instruction; under any other condition it becomes a loop over lanes.
__device__ __forceinline__ bool Elect() {
  uint32_t chosen;
  asm volatile(
      "{\n .reg .pred p;\n"
      " elect.sync _|p, 0xffffffff;\n"
      " selp.u32 %0, 1, 0, p;\n}"
      : "=r"(chosen));
  return chosen != 0;
}
__device__ __forceinline__ void Arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
#endif

}  // namespace crumb::models::cuda::ptx

namespace crumb::models::cuda {
namespace {

constexpr int kTile = 8;         // rows of W in a tile, the columns of an mma.sync
constexpr int kStep = 32;        // channels of two mma.sync
constexpr int kPieceMax = 1280;  // channels of a piece: 20 KiB of a tile, a slot of the ring
constexpr int kGroupWarps = 8;
constexpr int kGroups = 2;
constexpr int kWarps = kGroups * kGroupWarps;  // consumer warps, which multiply
constexpr int kThreads = 32 * kWarps;
constexpr int kStreamWarps = 4;  // warps that issue copies of weights
constexpr int kBlockThreads = kThreads + 32 * kStreamWarps;
constexpr int kVector = 8;       // bf16 elements of 16 bytes
constexpr int kNormVectors = 2;  // vectors per thread in RMSNorm, which bounds its inputs
constexpr int kAhead = 3;        // pieces of a block in flight; measured on an H200
constexpr int kAheadPaced = 4;   // the same if copies are paced
constexpr int kSlotsMin = 3;     // fewer slots cannot keep kAhead pieces in flight
constexpr int kSlotsMax = 10;    // bounds the open tiles below

// Bytes from row to row in a slot. 64 bytes more than whole lines place the rows that two lanes
// load into different banks.
constexpr int kRowStride = 2 * kPieceMax + 64;
constexpr int kSlotBytes = kTile * kRowStride;
static_assert(kRowStride % 128 == 64);

// How the outputs of a product are distributed over blocks. The host computes it, because divisions
// on the device would delay the first copies.
struct Division {
  uint32_t each, rest;  // outputs per block (pairs for kGate), and the remainder over all blocks
  int pieces, piece_steps, steps;
};

struct KernelParams {
  ProductChain chain;
  Division divisions[kChainProductsMax];
  uint32_t blocks_reciprocal;  // 2^32 / blocks, rounded up
  uint32_t pace;               // cycles per byte of a block, in 1/65536; 0: no pace
  int ahead;                   // pieces of a block in flight
  int slots;
  int x_stride;  // bytes
};

__host__ __device__ constexpr int XStride(int inputs) {
  return (2 * inputs + 127) / 128 * 128 + 64;
}

// Tiles whose partial sums may be open at a time: some warps have finished them and others have
// not. A warp that waits for a piece knows that all warps of its group have read the piece
// kSlotsMax before it, and the warp that adds a tile up multiplies one more tile first.
constexpr int kOpenTiles = kSlotsMax + 4;

// The outputs of one product that a block computes: `tiles` tiles of each + 1 (the first `larger`)
// or `each` outputs, whose rows of W are `pieces` pieces.
struct alignas(16) WorkRange {
  int begin, tiles, each, larger;
  int pieces, piece_steps, steps;

#if __CUDA_ARCH__ >= 900
  __device__ __forceinline__ int Begin(int tile) const {
    return begin + tile * each + min(tile, larger);
  }
  __device__ __forceinline__ int Count(int tile) const { return each + (tile < larger ? 1 : 0); }
  // Returns the steps of a piece; the last piece may have fewer than the others.
  __device__ __forceinline__ int Steps(int piece) const {
    return min(piece_steps, steps - piece * piece_steps);
  }
#endif
};

template <int kRows>
struct SharedState {
  WorkRange ranges[kChainProductsMax];
  uint64_t full[kSlotsMax], empty[kSlotsMax];
  int issued[kSlotsMax];  // the chain's piece that was last issued into each slot; -1 at first
  float squares[kWarps][kRows];
  alignas(8) float sums[kOpenTiles][kWarps][kRows][kTile];
};

constexpr int64_t kStateRowBytes = sizeof(SharedState<2>) - sizeof(SharedState<1>);
static_assert(sizeof(SharedState<4>) == sizeof(SharedState<1>) + 3 * kStateRowBytes);

#if __CUDA_ARCH__ >= 900

constexpr int kAheadWaiting = 2;  // pieces in flight while blocks wait for one another
constexpr int kPaceBurst = 2000;  // cycles by which a late warp may exceed its pace to catch up
constexpr int kSteps = kPieceMax / kStep / kGroupWarps;  // steps of a piece per warp
constexpr int kConsumers = 1;                            // named barrier of the consumer warps
constexpr int kTileSums = 2;                             // first named barrier of the open tiles
static_assert(kTileSums + kOpenTiles <= 16);

__device__ __forceinline__ WorkRange WorkRangeOf(const KernelParams& k, int index) {
  const Division& d = k.divisions[index];
  const bool gate = k.chain.products[index].output == ChainOutput::kGate;
  // The blocks that get one output more than others differ from product to product.
  uint32_t block = blockIdx.x + index;
  while (block >= gridDim.x) block -= gridDim.x;
  // The result is exact, because both factors are below the number of blocks.
  const uint32_t before = __umulhi(d.rest * block, k.blocks_reciprocal);
  const uint32_t after = __umulhi(d.rest * (block + 1), k.blocks_reciprocal);
  const uint32_t count = d.each + after - before, most = gate ? kTile / 2 : kTile;
  const uint32_t tiles = (count + most - 1) / most;
  WorkRange range;
  range.begin = static_cast<int>(d.each * block + before);
  range.tiles = static_cast<int>(tiles);
  range.each = static_cast<int>(tiles > 0 ? count / tiles : 0);
  range.larger = static_cast<int>(count) - range.each * range.tiles;
  range.steps = d.steps;
  range.pieces = d.pieces;
  range.piece_steps = d.piece_steps;
  return range;
}

// A position in the ring of slots, through which weights pass. `full` barriers complete when the
// copies into a slot have arrived, `empty` barriers when all warps of a group have read it.
class Ring {
 public:
  __device__ __forceinline__ Ring(const uint64_t* full, const uint64_t* empty, char* slots,
                                  int count)
      : full_(ptx::SharedAddress(full)),
        empty_(ptx::SharedAddress(empty)),
        slots_(ptx::SharedAddress(slots)),
        count_(count) {}

  __device__ __forceinline__ uint32_t full() const { return full_ + 8 * at_; }
  __device__ __forceinline__ uint32_t slot() const { return slots_ + at_ * kSlotBytes; }
  __device__ __forceinline__ int at() const { return at_; }
  __device__ __forceinline__ void WaitFull() const { ptx::WaitBarrier(full(), phase_); }
  __device__ __forceinline__ bool TryFull() const { return ptx::TryWaitBarrier(full(), phase_); }
  // All slots are empty at first.
  __device__ __forceinline__ void WaitEmpty() const {
    ptx::WaitBarrier(empty_ + 8 * at_, phase_ ^ 1);
  }
  __device__ __forceinline__ void ArriveEmpty() const { ptx::Arrive(empty_ + 8 * at_); }
  __device__ __forceinline__ void Next(int pieces = 1) {
    for (at_ += pieces; at_ >= count_; at_ -= count_) phase_ ^= 1;
  }

 private:
  uint32_t full_, empty_, slots_;
  int count_, at_ = 0, phase_ = 0;
};

// A warp that issues copies of weights; kStreamWarps of them take the pieces of a block in turn.
class Stream {
 public:
  __device__ __forceinline__ Stream(const KernelParams& k, const WorkRange* ranges, Ring ring,
                                    volatile int* issued, int warp)
      : chain_(k.chain),
        ranges_(ranges),
        issued_(issued),
        ring_(ring),
        landed_(ring),
        slots_(k.slots),
        warp_(warp),
        pace_(k.pace),
        due_(ptx::Cycles()) {
    // A group that waits for a slot must know that its previous piece has arrived: that was a piece
    // of the group, or one whose arrival was seen before the group's last piece was issued.
    most_ = min(k.ahead, slots_ % kGroups == 0 ? slots_ : slots_ - kGroups);
    ring_.Next(warp);
  }

  __device__ __forceinline__ void Run() {
    int before = 0;  // pieces of the previous products
    for (int index = 0; index < chain_.count; ++index) {
      const WorkRange range = ranges_[index];
      // Pieces that are issued before the blocks have this product's rows of x.
      const int early = index > 0 ? slots_ : 0;
      int number = (warp_ - before) & (kStreamWarps - 1), piece = number, tile = 0;
      while (true) {
        for (; piece >= range.pieces; piece -= range.pieces) ++tile;
        if (tile >= range.tiles) break;
        // Copies in flight delay every other access to memory by the time of their bytes.
        const int most = number < early ? min(kAheadWaiting, most_) : most_;
        for (; seen_ <= before + number - most; ++seen_) WaitLanded();
        ring_.WaitEmpty();
        WaitUntilDue(range, tile, piece, chain_.products[index].output);
        if (ptx::Elect()) {
          issued_[ring_.at()] = before + number;
          Issue(chain_.products[index], range, tile, piece);
        }
        __syncwarp();
        ring_.Next(kStreamWarps);
        number += kStreamWarps;
        piece += kStreamWarps;
      }
      before += range.tiles * range.pieces;
    }
  }

 private:
  // Waits until piece seen_ has arrived. If this warp is so late that the slot was filled again,
  // the parity of the barrier is ambiguous; the number of the piece issued into the slot is not.
  __device__ __forceinline__ void WaitLanded() {
    while (!landed_.TryFull() && issued_[landed_.at()] <= seen_) continue;
    landed_.Next();
  }

  // Waits until this warp may issue its next piece at the pace. Memory does not serve blocks
  // evenly: without a pace some blocks get ahead of others, for which all blocks wait in the end.
  __device__ __forceinline__ void WaitUntilDue(const WorkRange& range, int tile, int piece,
                                               ChainOutput output) {
    if (pace_ == 0) return;
    uint32_t now;
    do {
      now = ptx::Cycles();
    } while (static_cast<int>(now - due_) < 0);
    const uint32_t rows = range.Count(tile) * (output == ChainOutput::kGate ? 2 : 1);
    const uint32_t bytes = 2 * kStep * range.Steps(piece) * rows;
    // The other stream warps issue as many bytes in between.
    due_ +=
        max(static_cast<int>(now - due_) - kPaceBurst, 0) + (bytes * kStreamWarps * pace_ >> 16);
  }

  __device__ __forceinline__ void Issue(const ChainProduct& p, const WorkRange& range, int tile,
                                        int piece) const {
    const bool gate = p.output == ChainOutput::kGate;
    const int count = range.Count(tile), second_count = gate ? count : count - kTile / 2;
    const uint64_t row_bytes = 2 * static_cast<uint64_t>(p.inputs);
    const uint64_t first = reinterpret_cast<uint64_t>(p.w) + range.Begin(tile) * row_bytes +
                           2 * kStep * range.piece_steps * piece;
    const uint64_t second = first + row_bytes * (gate ? p.outputs / 2 : kTile / 2);
    const uint32_t bytes = 2 * kStep * range.Steps(piece), slot = ring_.slot();
    ptx::ArriveExpecting(ring_.full(), (gate ? 2 * count : count) * bytes);
#pragma unroll
    for (int r = 0; r < kTile / 2; ++r) {
      if (r < count)
        ptx::CopyBulk(slot + r * kRowStride, first + r * row_bytes, bytes, ring_.full());
      if (r < second_count) {
        ptx::CopyBulk(slot + (kTile / 2 + r) * kRowStride, second + r * row_bytes, bytes,
                      ring_.full());
      }
    }
  }

  const ProductChain& chain_;
  const WorkRange* ranges_;
  volatile int* issued_;
  Ring ring_, landed_;
  int slots_, warp_;
  int most_;      // pieces in flight at most
  int seen_ = 0;  // the first piece whose arrival was not seen
  uint32_t pace_;
  uint32_t due_;  // the clock at which this warp may issue again
};

#endif

}  // namespace
}  // namespace crumb::models::cuda
