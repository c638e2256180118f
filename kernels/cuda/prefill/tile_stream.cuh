// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "kernels/cuda/prefill/traits.cuh"

// The stream of INT2 page tiles of the mma.sync path.
namespace crumb::kernels::cuda::prefill {

// The block's tiles in shared memory, of which kLead are in flight ahead of the warps that read
// them. Every thread of the block makes the same calls.
template <class T>
class TileStream {
 public:
  __device__ __forceinline__ TileStream(const PrefillAttentionParams& p, const Block<T>& block,
                                        int begin, Shared<T>& shared)
      : p_(p),
        block_(block),
        shared_(shared),
        begin_(begin),
        next_(begin),
        fill_(0),
        use_(0),
        address_(0) {
    for (int i = 0; i < T::kLead; ++i) Fill();
  }

  // Waits for the next tile and prefetches another one. The tile stays valid until the next call.
  __device__ __forceinline__ const char* Next() {
    ptx::WaitCopies<T::kLead - 1>();
    __syncthreads();
    Fill();
    const char* tile = shared_.tiles[use_];
    if (++use_ == T::kStages) use_ = 0;
    return tile;
  }

 private:
  __device__ __forceinline__ void Fill() {
    if (next_ < block_.pages) {
      const char* from = reinterpret_cast<const char*>(Tile());
      char* to = shared_.tiles[fill_];
      for (int at = 16 * threadIdx.x; at < T::kTileBytes; at += 16 * T::kThreads) {
        ptx::CopyAsync16(ptx::SharedAddress(to + at), from + at);
      }
      ++next_;
      if (++fill_ == T::kStages) fill_ = 0;
    }
    ptx::CommitCopies();
  }

  // Each lane holds the address of one of the next 32 tiles.
  __device__ __forceinline__ uint64_t Tile() {
    const int index = (next_ - begin_) % 32, page = next_ + static_cast<int>(threadIdx.x % 32);
    if (index == 0 && page < block_.pages) {
      address_ =
          p_.page_address[static_cast<int64_t>(block_.sequence) * p_.shape.max_pages + page] +
          p_.page_layer_offset + block_.head * p_.page_head_stride;
    }
    return __shfl_sync(~0u, address_, index);
  }

  const PrefillAttentionParams& p_;
  const Block<T>& block_;
  Shared<T>& shared_;
  const int begin_;
  int next_;  // next page to copy
  int fill_, use_;
  uint64_t address_;
};

}  // namespace crumb::kernels::cuda::prefill
