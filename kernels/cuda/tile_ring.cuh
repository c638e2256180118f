// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "kernels/cuda/decode_params.h"
#include "kernels/cuda/ptx.cuh"

// What a warp keeps in flight: a ring of slots in shared memory, filled ahead with the warp's next
// tiles and BF16 chunks, across segment ends. No synchronisation beyond the warp.
namespace crumb::kernels::cuda {

// A BF16 chunk fills two slots, its K rows and then its V rows. Rows are padded by 16 bytes, so
// that the eight rows of a matrix fragment lie in different banks.
template <int kDim>
inline constexpr int kRowBytes = 2 * kDim + 16;

// Where the rows of one chunk come from.
struct ChunkSource {
  bool sink;
  int first;  // token of the sink or of the recent window
  int rows;   // 1..16
};

__device__ __forceinline__ ChunkSource SourceOf(const DecodeKernelParams& k, int sequence,
                                                int chunk) {
  const int sink = k.p.lengths.sink_tokens[sequence];
  const int sink_chunks = (sink + kChunkTokens - 1) / kChunkTokens;
  ChunkSource source;
  source.sink = chunk < sink_chunks;
  source.first = (source.sink ? chunk : chunk - sink_chunks) * kChunkTokens;
  const int tokens = source.sink ? sink : k.p.lengths.recent_tokens[sequence];
  source.rows = min(kChunkTokens, tokens - source.first);
  return source;
}

template <int kDim, bool kBulk>
class TileRing {
 public:
  // `slots` and `barriers` are this warp's.
  __device__ __forceinline__ void Start(const DecodeKernelParams& k, uint32_t slots,
                                        uint32_t barriers, int warp, const BlockShare& share) {
    slots_ = slots;
    barriers_ = barriers;
    warp_ = warp;
    lane_ = threadIdx.x % 32;
    use_slot_ = fill_slot_ = phase_ = 0;
#if __CUDA_ARCH__ >= 900
    if constexpr (kBulk) {
      if (lane_ == 0) {
        for (int i = 0; i < k.launch.stages; ++i) ptx::InitBarrier(barriers + 8 * i, 1);
        ptx::FenceBarrierInit();
        ptx::FenceCopyEngine();
      }
      __syncwarp();
    }
#endif
    segment_end_ = share.end;
    segment_ = share.begin;
    Take(share.first);
    if (unit_ >= unit_end_) Enter(k);
    for (int i = 0; i < k.launch.stages; ++i) Fill(k);
  }

  // Waits until the oldest slot has arrived and returns its address.
  __device__ __forceinline__ uint32_t Wait(const DecodeKernelParams& k) {
#if __CUDA_ARCH__ >= 900
    if constexpr (kBulk) {
      ptx::WaitBarrier(barriers_ + 8 * use_slot_, phase_);
    }
#endif
    if constexpr (!kBulk) {
      if (k.launch.stages == 3) {
        ptx::WaitCopies<2>();
      } else {
        ptx::WaitCopies<1>();
      }
      __syncwarp();
    }
    return slots_ + use_slot_ * static_cast<uint32_t>(k.launch.slot_bytes);
  }

  // The oldest slot has been read. It stays untouched until Fill.
  __device__ __forceinline__ void Release(const DecodeKernelParams& k) {
    __syncwarp();
    if (++use_slot_ == k.launch.stages) {
      use_slot_ = 0;
      phase_ ^= 1;
    }
  }

  // The slot released last.
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

  // Starts the copy of the warp's next tile into the slot released longest ago.
  __device__ __forceinline__ void Fill(const DecodeKernelParams& k) {
    if (segment_ < segment_end_) {
      const uint32_t slot = slots_ + fill_slot_ * static_cast<uint32_t>(k.launch.slot_bytes);
      const uint32_t barrier = barriers_ + 8 * fill_slot_;
      if (kind_ == kSegmentInt2) {
        FillTile(k, slot, barrier);
        unit_ += k.launch.warps;
        ++index_;
      } else {
        FillRows(k, slot, barrier);
        half_ ^= 1;
        if (half_ == 0) unit_ += k.launch.warps;
      }
      if (++fill_slot_ == k.launch.stages) fill_slot_ = 0;
      if (unit_ >= unit_end_) Enter(k);
    }
    if constexpr (!kBulk) ptx::CommitCopies();
  }

 private:
  // Moves to the next segment that has work for this warp.
  __device__ __forceinline__ void Enter(const DecodeKernelParams& k) {
    for (++segment_; segment_ < segment_end_; ++segment_) {
      Take(k.plan.segments[segment_]);
      if (unit_ < unit_end_) break;
    }
  }

  __device__ __forceinline__ void Take(const Segment& s) {
    unit_ = s.begin + warp_;
    unit_end_ = s.end;
    kind_ = s.kind;
    sequence_ = s.sequence;
    head_ = s.head;
    index_ = 0;
    half_ = 0;
  }

  __device__ __forceinline__ void FillTile(const DecodeKernelParams& k, uint32_t slot,
                                           uint32_t barrier) {
    // Each lane holds the address of one of the warp's next 32 tiles.
    if (index_ % 32 == 0) {
      const int page = unit_ + lane_ * k.launch.warps;
      address_ =
          page < unit_end_
              ? k.p.page_address[static_cast<int64_t>(sequence_) * k.p.shape.max_pages + page] +
                    k.p.page_layer_offset + head_ * k.p.page_head_stride
              : 0;
    }
    const uint64_t address = __shfl_sync(~0u, address_, index_ % 32);
    const uint32_t bytes = static_cast<uint32_t>(k.launch.slot_bytes);
#if __CUDA_ARCH__ >= 900
    if constexpr (kBulk) {
      if (lane_ == 0) {
        ptx::ArriveExpecting(barrier, bytes);
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
    const ChunkSource source = SourceOf(k, sequence_, unit_);
    const Bf16Rows& rows = source.sink ? k.p.sink : k.p.recent;
    const int row = kBulk ? lane_ : lane_ / 2;
    int token = source.first + row;
    if (!source.sink) {
      token += k.p.lengths.recent_begin[sequence_];
      if (token >= k.p.recent_capacity) token -= k.p.recent_capacity;
    }
    const uint64_t address = rows.address[sequence_] + rows.layer_offset +
                             head_ * rows.head_stride + token * rows.token_stride +
                             half_ * rows.v_offset;
#if __CUDA_ARCH__ >= 900
    if constexpr (kBulk) {
      if (lane_ == 0) ptx::ArriveExpecting(barrier, source.rows * 2 * kDim);
      __syncwarp();
      if (row < source.rows)
        ptx::CopyBulk(slot + row * kRowBytes<kDim>, address, 2 * kDim, barrier);
    }
#endif
    if constexpr (!kBulk) {
      if (row < source.rows) {
        for (int at = lane_ % 2 * kDim; at < (lane_ % 2 + 1) * kDim; at += 16) {
          ptx::CopyAsync16(slot + row * kRowBytes<kDim> + at,
                           reinterpret_cast<const char*>(address) + at);
        }
      }
    }
  }

  uint32_t slots_, barriers_;
  int warp_, lane_;
  int use_slot_, phase_, fill_slot_;
  // What is loaded next.
  int segment_, segment_end_;
  int unit_, unit_end_;
  int kind_, sequence_, head_;
  int index_;  // tiles of this segment loaded by the warp
  int half_;   // 0: K rows next, 1: V rows
  uint64_t address_;
};

}  // namespace crumb::kernels::cuda
