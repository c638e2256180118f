// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "kernels/cuda/decode/bf16_rows.cuh"
#include "kernels/cuda/decode/cluster_merge.cuh"
#include "kernels/cuda/decode/cluster_query.cuh"
#include "kernels/cuda/decode/cluster_rings.cuh"
#include "kernels/cuda/decode/int2_pages.cuh"

// The cluster schedule (docs/kernels/decode.md). In each block the last warps process chunks of the
// windows and the other warps process pages; afterwards all warps merge and finish the sequence.
namespace crumb::kernels::cuda {

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
// Returns how many of a block's warps process pages. One warp processes windows, or more if the
// windows are a large part of the sequence's bytes; a chunk has as many bytes as two pages. `count`
// is the number of blocks of the problem.
template <int kWarps>
__device__ __forceinline__ int PageWarps(int pages, int chunks, int count) {
  // This test avoids the divisions below for nearly every long sequence.
  if (chunks <= count || (kWarps - 2) * chunks < pages) return kWarps - 1;
  const int warps = 2 * kWarps * chunks / (2 * chunks + pages);
  return kWarps - max(1, min(min(warps, kWarps - 1), (chunks + count - 1) / count));
}

// Returns how many of `warps` have at least one of `units`, which are dealt round-robin over
// `count` blocks, of which this is number `own`.
__device__ __forceinline__ int ActiveWarps(int units, int own, int count, int warps) {
  return min(max(0, (units - own + count - 1) / count), warps);
}

// Returns the first page that the sliding window, if there is one, leaves to the oldest query
// token.
template <class T>
__device__ __forceinline__ int FirstPage(const DecodeKernelParams& k, int sink, int page_end,
                                         int recent) {
  if (!HasSlidingWindow<T>(k)) return 0;
  const int oldest = sink + page_end * T::kTokens + recent - k.p.shape.q_tokens - k.p.window + 1;
  return min(max(oldest - sink, 0) / T::kTokens, page_end);
}

// Returns the block's pages, or chunks, as a segment.
__device__ __forceinline__ Segment SegmentOf(const ClusterPlace& place, SegmentKind kind, int begin,
                                             int end) {
  Segment segment = {};
  segment.sequence = place.sequence;
  segment.head = place.head;
  segment.begin = begin;
  segment.end = end;
  segment.kind = kind;
  return segment;
}

// Sends the block's slice of the rotated query to the cluster, rounds the whole query when all
// slices have arrived, and prefetches the block's rows of R_V. The first `warps` warps call it.
template <class T>
__device__ __forceinline__ void ExchangeQuery(const DecodeKernelParams& k,
                                              const ClusterPlace& place,
                                              const ClusterMemory<T>& memory, int warps,
                                              const SliceRotation<T>& rotation) {
  rotation.Send(memory, warps);
  ptx::WaitRemote(memory.Barrier(kRotatedSlices), 0);
  for (int row = threadIdx.x / 32; row < T::kRows; row += warps) {
    QuantizeQueryRow<T>(memory.Floats(memory.at.query) + row * kStageStride<T::kDim>, row,
                        k.log2_scale,
                        reinterpret_cast<uint32_t*>(memory.shared + memory.at.fragment),
                        memory.Floats(memory.at.constant));
  }
  ptx::SyncThreads(1, 32 * warps);
  PrefetchInverseRotation<T>(k, memory, place, warps);
}

// Runs one block of a cluster.
template <class T>
__device__ __forceinline__ void RunCluster(const DecodeKernelParams& k, const ClusterPlace& place) {
  extern __shared__ __align__(128) char shared[];
  using Memory = ClusterMemory<T>;
  constexpr int kWarps = Memory::kWarps;
  const int warp = threadIdx.x / 32;
  const Memory memory(shared, k);

  // Barriers are initialised before any load is issued: behind loads all of this took half a
  // microsecond longer.
  PageRing<T> pages;
  WindowRing<T> windows;
  pages.Init(memory.Slots(warp), memory.Address(memory.at.barriers) + 8 * kClusterStages * warp);
  windows.Take(pages);
  if (threadIdx.x == 0) memory.InitExchanges(place.blocks);
  __syncwarp();
  ptx::ArriveCluster();

  // Loads complete in the order of issue: lengths and addresses come first, then R_K and the query.
  // Page addresses are requested for the usual roles of warps, before the lengths have arrived.
  const int sequence = place.sequence, count = place.count(), index = place.index();
  int sink = k.p.lengths.sink_tokens[sequence], page_end = k.p.lengths.pages[sequence];
  int recent = k.p.lengths.recent_tokens[sequence], bf16_pages = Bf16Pages(k.p.lengths, sequence);
  if (warp < kWarps - 1) {
    pages.Prepare(k, sequence, warp * count + index, (kWarps - 1) * count);
  }
  if (warp == kWarps - 1 || k.p.lengths.bf16_pages != nullptr) {
    windows.Prepare(k, sequence, place.head);
  }
  SliceRotation<T> rotation(k, place, memory);
  rotation.PrefetchMatrix();
  if (!k.p.overlap_previous) rotation.PrefetchQuery();

  // The compiler must not use the lengths above this point, because it would wait for them there.
  asm volatile("" : "+r"(sink), "+r"(page_end), "+r"(recent), "+r"(bf16_pages)::"memory");
  recent += kPageRows * bf16_pages;
  if (sink + page_end + recent == 0) {  // padding
    ptx::WaitCopies<0>();
    ptx::WaitCluster();
    if (k.p.overlap_previous) ptx::WaitForPrevious();
    return;
  }
  const int first_page = FirstPage<T>(k, sink, page_end, recent);
  const int chunks =
      (sink + kChunkTokens - 1) / kChunkTokens + (recent + kChunkTokens - 1) / kChunkTokens;
  const int page_warps = PageWarps<kWarps>(page_end - first_page, chunks, count);
  const bool takes_pages = warp < page_warps;
  const int page = warp * count + index, page_stride = page_warps * count;
  // The first blocks may have one page more, so chunks are dealt from the last block on.
  const int chunk = (warp - page_warps) * count + count - 1 - index;
  const int chunk_stride = (kWarps - page_warps) * count;
  if (takes_pages) {
    if (first_page > 0 || page_warps < kWarps - 1) {
      pages.Prepare(k, sequence, first_page + page, page_stride);
    }
    pages.Start(k, sequence, place.head, page_end);
  } else {
    if (warp < kWarps - 1 && k.p.lengths.bf16_pages == nullptr) {
      windows.Prepare(k, sequence, place.head);
    }
    // the previous kernel may write the newest rows
    if (k.p.overlap_previous) ptx::WaitForPrevious();
    windows.Start(k, sequence, sink, recent, page_end, chunk, chunk_stride, chunks);
  }
  if (k.p.overlap_previous) {
    ptx::WaitForPrevious();
    ptx::LaunchDependents();
    rotation.PrefetchQuery();
  }

  // The query is rotated while tiles arrive.
  rotation.Multiply(memory.Floats(memory.at.query_parts));
  __syncthreads();
  ptx::WaitCluster();
  const WarpRoles roles = {page_warps, ActiveWarps(page_end - first_page, index, count, page_warps),
                           ActiveWarps(chunks, count - 1 - index, count, kWarps - page_warps)};
  if (takes_pages) {
    ExchangeQuery<T>(k, place, memory, page_warps, rotation);
    const Segment segment = SegmentOf(place, kSegmentInt2, first_page, page_end);
    if (warp < roles.active_pages) {
      SegmentState<T> state;
      AttendInt2<T>(k, segment, memory.Rotated(), Worker{page, page_stride, 0}, pages, state);
      StoreWarpSums<T>(memory, memory.Slots(warp), warp, state);
    }
  } else {
    const Segment segment = SegmentOf(place, kSegmentBf16, 0, chunks);
    if (chunk < chunks) {
      SegmentState<T> state;
      AttendBf16<T>(k, segment, Worker{chunk, chunk_stride, 0}, windows, state);
      StoreWarpSums<T>(memory, memory.Slots(warp), warp, state);
    }
  }
  ptx::WaitCopies<0>();
  __syncthreads();

  const int before = CountArrival(k, place);
  SendBlockSums<T>(memory, place, roles);
  MergeSlice<T>(k, memory, place);
  StoreArrivals(k, memory, place, before);
  __syncthreads();
  FinishSlice<T>(k, memory, place);
}
#endif

template <class T>
__global__ void __launch_bounds__(T::kThreadsMax, 1)
    DecodeClusterKernel(const __grid_constant__ DecodeKernelParams k) {
#if __CUDA_ARCH__ >= 900  // never launched on older devices
  RunCluster<T>(k, ClusterPlace(k));
#endif
}

}  // namespace crumb::kernels::cuda
