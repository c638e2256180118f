// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "kernels/cuda/decode/kernels.h"
#include "kernels/cuda/decode/traits.cuh"

// Rings of tiles in flight for warps of the cluster schedule. Slots are those of TileRing, but a
// warp has only one kind of work: pages of one problem at a fixed stride, or chunks of its windows.
//
// A warp calls Prepare (request addresses), Start (fill all slots), then for each tile or chunk
// Wait, Release and Fill. The states of a slot are those of TileRing.
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
namespace crumb::kernels::cuda {

// A ring of kClusterStages slots, each with an mbarrier on which all lanes arrive. A slot is
// filled, waited for, released and filled again, in ring order.
template <class T>
class ClusterSlots {
 public:
  // Initialises the ring. REQUIRES: all lanes call it, before the first copy.
  __device__ __forceinline__ void Init(uint32_t slots, uint32_t barriers) {
    slots_ = slots;
    barriers_ = barriers;
    if (threadIdx.x % 32 == 0) {
#pragma unroll
      for (int i = 0; i < kClusterStages; ++i) ptx::InitBarrier(barriers + 8 * i, 32);
      ptx::FenceBarrierInit();
      ptx::FenceCopyEngine();
    }
    __syncwarp();
  }

  // Uses the ring that `other` has initialised.
  __device__ __forceinline__ void Take(const ClusterSlots& other) {
    slots_ = other.slots_;
    barriers_ = other.barriers_;
  }

  // Wait, Release and FenceWrites have the contracts of TileRing.
  __device__ __forceinline__ uint32_t Wait(const DecodeKernelParams&) {
    ptx::WaitBarrier(barriers_ + 8 * use_, phase_);
    return slots_ + use_ * T::kTileBytes;
  }
  __device__ __forceinline__ void Release(const DecodeKernelParams&) {
    __syncwarp();
    if (++use_ == kClusterStages) {
      use_ = 0;
      phase_ ^= 1;
    }
  }
  __device__ __forceinline__ void FenceWrites() {
    ptx::FenceCopyEngine();
    __syncwarp();
  }

 protected:
  __device__ __forceinline__ uint32_t fill_slot() const { return slots_ + fill_ * T::kTileBytes; }
  __device__ __forceinline__ uint32_t fill_barrier() const { return barriers_ + 8 * fill_; }
  __device__ __forceinline__ void Filled() {
    if (++fill_ == kClusterStages) fill_ = 0;
  }

 private:
  uint32_t slots_ = 0, barriers_ = 0;
  int use_ = 0, phase_ = 0, fill_ = 0;
};

// The ring of a warp that processes pages first, first + stride, ... of a problem.
template <class T>
class PageRing : public ClusterSlots<T> {
 public:
  // Requests the addresses of the first pages. The number of pages need not be known.
  __device__ __forceinline__ void Prepare(const DecodeKernelParams& k, int sequence, int first,
                                          int stride) {
    unit_ = first;
    stride_ = stride;
    Load(k, sequence);
  }
  __device__ __forceinline__ void Start(const DecodeKernelParams& k, int sequence, int head,
                                        int end) {
    sequence_ = sequence;
    base_ = k.p.page_layer_offset + head * k.p.page_head_stride;
    end_ = end;
#pragma unroll 1
    for (int i = 0; i < kClusterStages; ++i) Fill(k);
  }
  __device__ __forceinline__ void Fill(const DecodeKernelParams& k) {
    if (unit_ >= end_) return;
    if (index_ == 32) {
      Load(k, sequence_);
      index_ = 0;
    }
    const uint64_t address = __shfl_sync(~0u, address_, index_) + base_;
    if (threadIdx.x % 32 == 0) {
      ptx::ArriveExpecting(this->fill_barrier(), T::kTileBytes);
      ptx::Arrive(this->fill_barrier(), 31);  // arrivals of the other lanes
      ptx::CopyBulk(this->fill_slot(), address, T::kTileBytes, this->fill_barrier());
    }
    this->Filled();
    unit_ += stride_;
    ++index_;
  }

 private:
  // Each lane holds the address of one of the warp's next 32 pages.
  __device__ __forceinline__ void Load(const DecodeKernelParams& k, int sequence) {
    const int64_t page = unit_ + static_cast<int64_t>(threadIdx.x % 32) * stride_;
    address_ = 0;
    if (page < k.p.shape.max_pages) {
      address_ = k.p.page_address[static_cast<int64_t>(sequence) * k.p.shape.max_pages + page];
    }
  }

  int unit_ = 0, stride_ = 1, end_ = 0, index_ = 0, sequence_ = 0;
  int64_t base_ = 0;
  uint64_t address_ = 0;
};

// The ring of a warp that processes chunks first, first + stride, ... of a problem's windows. Slots
// hold the K rows and the V rows of a chunk alternately.
template <class T>
class WindowRing : public ClusterSlots<T> {
 public:
  // Requests the addresses of the windows' rows.
  __device__ __forceinline__ void Prepare(const DecodeKernelParams& k, int sequence, int head) {
    sink_ = k.p.sink.address[sequence] + k.p.sink.layer_offset + head * k.p.sink.head_stride;
    recent_ =
        k.p.recent.address[sequence] + k.p.recent.layer_offset + head * k.p.recent.head_stride;
    begin_ = k.p.lengths.recent_begin[sequence];
    page_base_ = k.p.sink.layer_offset + head * k.p.sink.head_stride;
  }
  // Starts copying. `tokens` counts the BF16 tokens behind the `int2_pages` pages of INT2 history:
  // those of BF16 pages come first, then recent ones.
  __device__ __forceinline__ void Start(const DecodeKernelParams& k, int sequence, int sink_tokens,
                                        int tokens, int int2_pages, int first, int stride,
                                        int end) {
    sink_tokens_ = sink_tokens;
    tokens_ = tokens;
    paged_ = kPageRows * Bf16Pages(k.p.lengths, sequence);
    table_ = static_cast<int64_t>(sequence) * k.p.shape.max_pages + int2_pages;
    unit_ = first;
    stride_ = stride;
    end_ = end;
#pragma unroll 1
    for (int i = 0; i < kClusterStages; ++i) Fill(k);
  }
  __device__ __forceinline__ void Fill(const DecodeKernelParams& k) {
    if (unit_ >= end_) return;
    const ChunkSource source = SourceOf(sink_tokens_, tokens_, unit_);
    const bool page = source.InPage(paged_);
    if (paged_ > 0 && !values_ && index_ % 32 == 0) Load(k);
    const Bf16Rows& rows = source.sink || page ? k.p.sink : k.p.recent;
    uint64_t base = source.sink ? sink_ : recent_;
    if (paged_ > 0) {
      const uint64_t held = __shfl_sync(~0u, address_, index_ % 32);
      if (page) base = held + page_base_;
    }
    CopyChunk<T::kDim>(source, paged_, base + (values_ ? rows.v_offset : 0), rows.token_stride,
                       begin_, k.p.recent_capacity, this->fill_slot());
    ptx::ArriveWithCopies(this->fill_barrier());
    this->Filled();
    if (values_) {
      unit_ += stride_;
      ++index_;
    }
    values_ = !values_;
  }

 private:
  // Each lane holds the address of the BF16 page of one of the warp's next 32 chunks.
  __device__ __forceinline__ void Load(const DecodeKernelParams& k) {
    const int64_t unit = unit_ + static_cast<int64_t>(threadIdx.x % 32) * stride_;
    address_ = 0;
    if (unit >= end_) return;
    const ChunkSource source = SourceOf(sink_tokens_, tokens_, static_cast<int>(unit));
    if (source.InPage(paged_)) {
      address_ = k.p.page_address[table_ + source.first / kPageRows];
    }
  }

  uint64_t sink_ = 0, recent_ = 0, address_ = 0;
  int64_t page_base_ = 0, table_ = 0;
  int begin_ = 0, sink_tokens_ = 0, tokens_ = 0, paged_ = 0;
  int unit_ = 0, stride_ = 1, end_ = 0, index_ = 0;
  bool values_ = false;
};

}  // namespace crumb::kernels::cuda
#endif
