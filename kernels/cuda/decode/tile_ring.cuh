// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "kernels/cuda/common/page_layout.cuh"
#include "kernels/cuda/decode/decode_ptx.cuh"
#include "kernels/cuda/decode/kernels.h"

// A warp's ring of slots in shared memory. It is filled ahead with the warp's next tiles and BF16
// chunks, across segment boundaries, so that copies stay in flight while the warp computes. Only
// the warp itself synchronises on it.
//
// States of a slot, through which the warp passes in ring order:
//   free      Fill starts a copy into the slot                            -> filling
//   filling   the copy is in flight; Wait blocks until it has completed   -> arrived
//   arrived   the warp reads the slot and calls Release                   -> released
//   released  the slot keeps its contents until the next Fill             -> filling
// Between Release and Fill the warp may use the slot as scratch memory (StorePartial); it then
// calls FenceWrites before Fill. A slot's mbarrier completes once per use, and `phase_` is the
// parity of the use of the oldest slot.
namespace crumb::kernels::cuda {

// A BF16 chunk occupies two slots: its K rows, then its V rows. Two neighbouring tokens lie
// together, as in memory; such token pairs are padded by 16 bytes, so that the first rows of eight
// pairs lie in different banks, and the second rows too. Row r of an MMA fragment is token
// ChunkToken(r).
template <int kDim>
inline constexpr int kTokenPairBytes = 4 * kDim + 16;
template <int kDim>
__device__ __forceinline__ int ChunkRowAt(int token) {
  return token / 2 * kTokenPairBytes<kDim> + token % 2 * (2 * kDim);
}
__device__ __forceinline__ int ChunkToken(int row) { return row % 8 * 2 + row / 8; }

// The source of the rows of one chunk.
struct ChunkSource {
  bool sink;
  int first;  // index of the first token in the sink, or in BF16 pages and recent window
  int rows;   // 1 to 16

  // Returns whether the chunk lies in the BF16 pages, which hold `paged` tokens.
  __device__ __forceinline__ bool InPage(int paged) const { return !sink && first < paged; }
};

__device__ __forceinline__ ChunkSource SourceOf(int sink_tokens, int recent_tokens, int chunk) {
  const int sink_chunks = (sink_tokens + kChunkTokens - 1) / kChunkTokens;
  ChunkSource source;
  source.sink = chunk < sink_chunks;
  source.first = (source.sink ? chunk : chunk - sink_chunks) * kChunkTokens;
  source.rows = min(kChunkTokens, (source.sink ? sink_tokens : recent_tokens) - source.first);
  return source;
}

// Starts copying a chunk's K or V rows to a slot by 16-byte cp.async. One warp calls it. `base` is
// the first row of sink, BF16 page or ring, `begin` the slot of the oldest of `capacity` recent
// tokens.
template <int kDim>
__device__ __forceinline__ void CopyChunk(const ChunkSource& source, int paged, uint64_t base,
                                          int64_t stride, int begin, int capacity, uint32_t slot) {
  constexpr int kPieces = kDim / 8;      // 16-byte pieces of a row
  constexpr int kAtOnce = 32 / kPieces;  // rows per iteration
  const int lane = threadIdx.x % 32;
  const bool page = source.InPage(paged);
  // Outside the ring the rows of a chunk are consecutive.
  const int first = page ? source.first % kPageRows : source.first - (source.sink ? 0 : paged);
  if (source.sink || page) capacity = first + kChunkTokens;
  int row = lane / kPieces;
  int token = first + row + (source.sink || page ? 0 : begin);
  if (token >= capacity) token -= capacity;
  uint64_t from = base + token * stride + lane % kPieces * 16;
#pragma unroll 2
  for (; row < source.rows; row += kAtOnce) {
    ptx::CopyAsync16(slot + ChunkRowAt<kDim>(row) + lane % kPieces * 16,
                     reinterpret_cast<const void*>(from));
    from += kAtOnce * stride;
    token += kAtOnce;
    if (token >= capacity) token -= capacity, from -= capacity * stride;
  }
}

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
// Starts the same copy by bulk copies, one for two tokens whose rows are consecutive. All lanes
// arrive at `barrier`.
template <int kDim>
__device__ __forceinline__ void CopyChunkBulk(const ChunkSource& source, int paged, uint64_t base,
                                              int64_t stride, int begin, int capacity,
                                              uint32_t slot, uint32_t barrier) {
  constexpr uint32_t kBytes = 2 * kDim;
  const int lane = threadIdx.x % 32, row = 2 * lane;
  if (lane == 0) {
    ptx::ArriveExpecting(barrier, source.rows * kBytes);
    ptx::Arrive(barrier, 31);  // arrivals of the other lanes
  }
  if (row >= source.rows) return;
  const bool page = source.InPage(paged), ring = !source.sink && !page;
  int token = (page ? source.first % kPageRows : source.first - (source.sink ? 0 : paged)) + row +
              (ring ? begin : 0);
  if (ring && token >= capacity) token -= capacity;
  const uint32_t to = slot + lane * kTokenPairBytes<kDim>;
  const uint64_t from = base + token * stride;
  const bool both = row + 1 < source.rows, wraps = ring && token + 1 == capacity;
  if (both && !wraps && stride == kBytes) {
    ptx::CopyBulk(to, from, 2 * kBytes, barrier);
    return;
  }
  ptx::CopyBulk(to, from, kBytes, barrier);
  if (both) ptx::CopyBulk(to + kBytes, wraps ? base : from + stride, kBytes, barrier);
}
#endif

// The warps that process a segment together: a whole block, or kWorkerWarps of it.
struct Worker {
  int warp;   // index of this warp in the worker
  int warps;  // warps of the worker
  int index;  // index of the worker in the block

  __device__ __forceinline__ int thread() const { return 32 * warp + threadIdx.x % 32; }
  __device__ __forceinline__ int threads() const { return 32 * warps; }
  // Waits for all warps of the worker.
  __device__ __forceinline__ void Sync() const { ptx::SyncThreads(1 + index, threads()); }
};

template <int kDim, bool kBulk>
class TileRing {
 public:
  // `slots` and `barriers` are this warp's. The constructor runs before any load is issued: the
  // fence behind the initialisation would wait for it.
  __device__ __forceinline__ TileRing(const DecodeKernelParams& k, uint32_t slots,
                                      uint32_t barriers)
      : slots_(slots), barriers_(barriers), lane_(threadIdx.x % 32) {
    use_slot_ = fill_slot_ = phase_ = 0;
#if __CUDA_ARCH__ >= 900
    if constexpr (kBulk) {
      if (lane_ == 0) {
#pragma unroll 1
        for (int i = 0; i < k.launch.stages; ++i) ptx::InitBarrier(barriers + 8 * i, 32);
        ptx::FenceBarrierInit();
        ptx::FenceCopyEngine();
      }
      __syncwarp();
    }
#endif
  }

  // Finds the first tiles, which Start copies.
  __device__ __forceinline__ void Prepare(const DecodeKernelParams& k, const Worker& worker,
                                          const WorkRange& range) {
    warp_ = worker.warp;
    warps_ = worker.warps;
    segment_end_ = range.end;
    segment_ = range.begin;
    unit_ = unit_end_ = 0;
    kind_ = kSegmentInt2;
    if (segment_ >= segment_end_) return;
    Take(range.first);
    if (unit_ < unit_end_) LoadAddresses(k, range.first);
  }

  // Returns whether the first copies, if any, are of page tiles.
  __device__ __forceinline__ bool StartsWithTiles() const { return kind_ == kSegmentInt2; }

  // Start begins the copies of the first segment only, because finding the next segment would delay
  // the block. Complete begins the others.
  __device__ __forceinline__ void Start(const DecodeKernelParams& k) {
    started_ = 0;
#pragma unroll 1
    for (; started_ < k.launch.stages && unit_ < unit_end_; ++started_) FillSlot(k);
  }
  __device__ __forceinline__ void Complete(const DecodeKernelParams& k) {
    if (segment_ < segment_end_ && unit_ >= unit_end_) Enter(k);
#pragma unroll 1
    for (; started_ < k.launch.stages; ++started_) Fill(k);
  }

  // Waits until the oldest slot has arrived and returns its address.
  __device__ __forceinline__ uint32_t Wait(const DecodeKernelParams& k) {
#if __CUDA_ARCH__ >= 900
    if constexpr (kBulk) {
      ptx::WaitBarrier(barriers_ + 8 * use_slot_, phase_);
    }
#endif
    if constexpr (!kBulk) {
      if (k.launch.stages == 4) {
        ptx::WaitCopies<3>();
      } else if (k.launch.stages == 3) {
        ptx::WaitCopies<2>();
      } else {
        ptx::WaitCopies<1>();
      }
      __syncwarp();
    }
    return slots_ + use_slot_ * static_cast<uint32_t>(k.launch.slot_bytes);
  }

  // Marks the oldest slot as read. It is not overwritten before Fill.
  __device__ __forceinline__ void Release(const DecodeKernelParams& k) {
    __syncwarp();
    if (++use_slot_ == k.launch.stages) {
      use_slot_ = 0;
      phase_ ^= 1;
    }
  }

  // Returns the slot that was released last.
  __device__ __forceinline__ uint32_t LastSlot(const DecodeKernelParams& k) const {
    const int slot = use_slot_ == 0 ? k.launch.stages - 1 : use_slot_ - 1;
    return slots_ + slot * static_cast<uint32_t>(k.launch.slot_bytes);
  }

  // Orders ordinary writes to a slot before the copy that fills it next.
  __device__ __forceinline__ void FenceWrites() {
#if __CUDA_ARCH__ >= 900
    if constexpr (kBulk) ptx::FenceCopyEngine();
#endif
    __syncwarp();
  }

  // Starts copying the warp's next tile into the slot that was released longest ago.
  __device__ __forceinline__ void Fill(const DecodeKernelParams& k) {
    if (segment_ < segment_end_) {
      FillSlot(k);
      if (unit_ >= unit_end_) Enter(k);
    } else if constexpr (!kBulk) {
      ptx::CommitCopies();
    }
  }

 private:
  // Lanes from kPageLane on hold addresses of BF16 pages, one for each of the next kPageLanes
  // chunks.
  static constexpr int kPageLane = 8;
  static constexpr int kPageLanes = 32 - kPageLane;

  __device__ __forceinline__ void FillSlot(const DecodeKernelParams& k) {
    const uint32_t slot = slots_ + fill_slot_ * static_cast<uint32_t>(k.launch.slot_bytes);
    const uint32_t barrier = barriers_ + 8 * fill_slot_;
    if (kind_ == kSegmentInt2) {
      FillTile(k, slot, barrier);
      unit_ += warps_;
    } else {
      FillRows(k, slot, barrier);
      if (index_ % 2 != 0) unit_ += warps_;
    }
    ++index_;
    if (++fill_slot_ == k.launch.stages) fill_slot_ = 0;
    if constexpr (!kBulk) ptx::CommitCopies();
  }

  // Advances to the next segment that has work for this warp.
  __device__ __forceinline__ void Enter(const DecodeKernelParams& k) {
    for (++segment_; segment_ < segment_end_; ++segment_) {
      const Segment& segment = k.plan.segments[segment_];
      Take(segment);
      if (unit_ >= unit_end_) continue;
      LoadAddresses(k, segment);
      break;
    }
  }

  __device__ __forceinline__ void Take(const Segment& s) {
    unit_ = s.begin + warp_;
    unit_end_ = s.end;
    kind_ = s.kind;
    index_ = 0;
  }

  // In an INT2 segment each lane holds the address of one of the warp's next 32 tiles. In a BF16
  // segment lanes 0 to 5 hold the addresses of the head's sink and recent rows, the numbers of sink
  // and recent tokens, the ring's first slot and the number of BF16 pages; lanes from kPageLane on
  // hold the addresses of the pages of the warp's next chunks.
  __device__ __forceinline__ void LoadAddresses(const DecodeKernelParams& k, const Segment& s) {
    const DecodeLengths& lengths = k.p.lengths;
    address_ = 0;
    if (kind_ == kSegmentInt2) {
      const int page = unit_ + lane_ * warps_;
      if (page < unit_end_) {
        address_ = k.p.page_address[static_cast<int64_t>(s.sequence) * k.p.shape.max_pages + page] +
                   k.p.page_layer_offset + s.head * k.p.page_head_stride;
      }
    } else if (lane_ < 2) {
      const Bf16Rows& rows = lane_ == 0 ? k.p.sink : k.p.recent;
      address_ = rows.address[s.sequence] + rows.layer_offset + s.head * rows.head_stride;
    } else if (lane_ < 5) {
      address_ = (lane_ == 2   ? lengths.sink_tokens
                  : lane_ == 3 ? lengths.recent_tokens
                               : lengths.recent_begin)[s.sequence];
    } else if (lengths.bf16_pages != nullptr) {
      const int pages = lengths.bf16_pages[s.sequence];
      if (lane_ == 5) {
        address_ = pages;
      } else if (lane_ >= kPageLane && pages > 0) {
        const int sink_tokens = lengths.sink_tokens[s.sequence];
        const ChunkSource source =
            SourceOf(sink_tokens, pages * kPageRows, unit_ + (lane_ - kPageLane) * warps_);
        const int page = source.first / kPageRows;
        if (!source.sink && page < pages) {
          address_ = k.p.page_address[static_cast<int64_t>(s.sequence) * k.p.shape.max_pages +
                                      lengths.pages[s.sequence] + page] +
                     k.p.sink.layer_offset + s.head * k.p.sink.head_stride;
        }
      }
    }
  }

  __device__ __forceinline__ void FillTile(const DecodeKernelParams& k, uint32_t slot,
                                           uint32_t barrier) {
    if (index_ % 32 == 0 && index_ > 0) LoadAddresses(k, k.plan.segments[segment_]);
    const uint64_t address = __shfl_sync(~0u, address_, index_ % 32);
    const uint32_t bytes = static_cast<uint32_t>(k.launch.slot_bytes);
#if __CUDA_ARCH__ >= 900
    if constexpr (kBulk) {
      if (lane_ == 0) {
        ptx::ArriveExpecting(barrier, bytes);
        ptx::Arrive(barrier, 31);  // arrivals of the other lanes
        ptx::CopyBulk(slot, address, bytes, barrier);
      }
    }
#endif
    if constexpr (!kBulk) {
      for (uint32_t at = 16 * lane_; at < bytes; at += 512) {
        ptx::CopyAsync16(slot + at, reinterpret_cast<const char*>(address) + at);
      }
    }
  }

  __device__ __forceinline__ void FillRows(const DecodeKernelParams& k, uint32_t slot,
                                           uint32_t barrier) {
    const auto held = [&](int lane) { return __shfl_sync(~0u, address_, lane); };
    const int sink_tokens = static_cast<int>(held(2));
    const int paged = static_cast<int>(held(5)) * kPageRows;
    const ChunkSource source = SourceOf(sink_tokens, paged + static_cast<int>(held(3)), unit_);
    const bool page = source.InPage(paged);
    if (page && index_ % 2 == 0 && index_ / 2 % kPageLanes == 0 && index_ > 0) {
      LoadAddresses(k, k.plan.segments[segment_]);
    }
    const Bf16Rows& rows = source.sink || page ? k.p.sink : k.p.recent;
    const uint64_t base = held(page          ? kPageLane + index_ / 2 % kPageLanes
                               : source.sink ? 0
                                             : 1) +
                          index_ % 2 * rows.v_offset;
    const int begin = static_cast<int>(held(4));
#if __CUDA_ARCH__ >= 900
    if constexpr (kBulk) {
      CopyChunkBulk<kDim>(source, paged, base, rows.token_stride, begin, k.p.recent_capacity, slot,
                          barrier);
    }
#endif
    if constexpr (!kBulk) {
      CopyChunk<kDim>(source, paged, base, rows.token_stride, begin, k.p.recent_capacity, slot);
    }
  }

  uint32_t slots_, barriers_;
  int warp_, warps_, lane_;
  int use_slot_, phase_, fill_slot_;
  int started_;  // copies
  // The position of the next copy.
  int segment_, segment_end_;
  int unit_, unit_end_;
  int kind_;
  // slots of this segment that the warp has filled; K rows and V rows of a chunk alternate
  int index_;
  uint64_t address_;
};

}  // namespace crumb::kernels::cuda
