// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "kernels/cuda/decode/bf16_rows.cuh"
#include "kernels/cuda/decode/cluster_merge.cuh"
#include "kernels/cuda/decode/cluster_query.cuh"
#include "kernels/cuda/decode/cluster_rings.cuh"
#include "kernels/cuda/decode/int2_pages.cuh"

// The cluster form (decode_cluster.h). A block's last warp takes chunks
// of the windows, the others take pages; all of them finish the sequence.
namespace crumb::kernels::cuda {

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
// One warp of a block has the windows, or more where they are much of the sequence: by bytes, a
// chunk is as much as two pages. `count`: the pair's blocks.
template <int kWarps>
__device__ __forceinline__ int PageWarps(int pages, int chunks, int count) {
  // Without the divisions below, which nearly no long sequence needs.
  if (chunks <= count || (kWarps - 2) * chunks < pages) return kWarps - 1;
  const int share = 2 * kWarps * chunks / (2 * chunks + pages);
  return kWarps - max(1, min(min(share, kWarps - 1), (chunks + count - 1) / count));
}

// Warps, from the first of `warps` on, that get one of `units` dealt to this block: place `own`.
__device__ __forceinline__ int ActiveWarps(int units, int own, int count, int warps) {
  return min(max(0, (units - own + count - 1) / count), warps);
}

// One block.
template <class T>
__device__ __forceinline__ void RunCluster(const DecodeKernelParams& k, const ClusterPlace& place) {
  extern __shared__ __align__(128) char shared[];
  using Memory = ClusterMemory<T>;
  constexpr int kWarps = Memory::kWarps;
  const int warp = threadIdx.x / 32;
  const Memory memory(shared, k);

  // Barriers before anything is asked for: with them behind it, all of this took half a microsecond
  // longer.
  PageRing<T> pages;
  WindowRing<T> windows;
  pages.Init(memory.Slots(warp), memory.Address(memory.at.barriers) + 8 * kClusterStages * warp);
  windows.Take(pages);
  if (threadIdx.x == 0) memory.InitExchanges(place.blocks);
  __syncwarp();
  ptx::ArriveCluster();

  // What is asked for first arrives first: lengths and addresses, then R_K and the query. As long
  // as lengths are not here, addresses are those of the usual roles.
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
  rotation.AskMatrix();
  if (!k.p.overlap_previous) rotation.AskQuery();

  // Nothing is made of the lengths ahead of this: it would wait for them.
  asm volatile("" : "+r"(sink), "+r"(page_end), "+r"(recent), "+r"(bf16_pages)::"memory");
  recent += kPageRows * bf16_pages;
  if (sink + page_end + recent == 0) {  // padding
    ptx::WaitCopies<0>();
    ptx::WaitCluster();
    if (k.p.overlap_previous) ptx::WaitForPrevious();
    return;
  }
  int first_page = 0;
  if (Windowed<T>(k)) {
    const int oldest = sink + page_end * T::kTokens + recent - k.p.shape.q_tokens - k.p.window + 1;
    first_page = min(max(oldest - sink, 0) / T::kTokens, page_end);
  }
  const int chunks =
      (sink + kChunkTokens - 1) / kChunkTokens + (recent + kChunkTokens - 1) / kChunkTokens;
  const int page_warps = PageWarps<kWarps>(page_end - first_page, chunks, count);
  const bool takes_pages = warp < page_warps;
  const int page = warp * count + index, page_stride = page_warps * count;
  // The first blocks have a page more: chunks begin at the last.
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
    if (k.p.overlap_previous) ptx::WaitForPrevious();  // it may write the newest rows
    windows.Start(k, sequence, sink, recent, page_end, chunk, chunk_stride, chunks);
  }
  if (k.p.overlap_previous) {
    ptx::WaitForPrevious();
    ptx::LaunchDependents();
    rotation.AskQuery();
  }

  // The rotated query, while tiles arrive.
  rotation.Multiply(memory.Floats(memory.at.products));
  __syncthreads();
  ptx::WaitCluster();
  Segment segment = {};
  segment.sequence = sequence;
  segment.head = place.head;
  const WarpRoles roles = {page_warps, ActiveWarps(page_end - first_page, index, count, page_warps),
                           ActiveWarps(chunks, count - 1 - index, count, kWarps - page_warps)};
  if (takes_pages) {
    rotation.Send(memory, page_warps);
    ptx::WaitRemote(memory.Barrier(kRotatedSlices), 0);
    for (int row = warp; row < T::kRows; row += page_warps) {
      QuantizeQueryRow<T>(memory.Floats(memory.at.query) + row * kStageStride<T::kDim>, row,
                          k.log2_scale, reinterpret_cast<uint32_t*>(shared + memory.at.fragment),
                          memory.Floats(memory.at.constant));
    }
    ptx::SyncThreads(1, 32 * page_warps);
    AskTurn<T>(k, memory, place, page_warps);
    segment.begin = first_page;
    segment.end = page_end;
    segment.kind = kSegmentInt2;
    if (warp < roles.active_pages) {
      SegmentState<T> state;
      AttendInt2<T>(k, segment, memory.Rotated(), WarpGroup{page, page_stride, 0}, pages, state);
      KeepWarpSums<T>(memory, memory.Slots(warp), warp, state);
    }
  } else {
    segment.begin = 0;
    segment.end = chunks;
    segment.kind = kSegmentBf16;
    if (chunk < chunks) {
      SegmentState<T> state;
      AttendBf16<T>(k, segment, WarpGroup{chunk, chunk_stride, 0}, windows, state);
      KeepWarpSums<T>(memory, memory.Slots(warp), warp, state);
    }
  }
  ptx::WaitCopies<0>();
  __syncthreads();

  const int before = CountPart(k, place);
  SendBlockSums<T>(memory, place, roles);
  MergeSlice<T>(k, memory, place);
  KeepCount(k, memory, place, before);
  __syncthreads();
  FinishSlice<T>(k, memory, place);
}
#endif

template <class T>
__global__ void __launch_bounds__(T::kThreadsMax, 1)
    DecodeClusterKernel(const __grid_constant__ DecodeKernelParams k) {
#if __CUDA_ARCH__ >= 900  // never launched on others
  RunCluster<T>(k, ClusterPlace(k));
#endif
}

}  // namespace crumb::kernels::cuda
