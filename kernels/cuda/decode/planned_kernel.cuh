// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kernels/cuda/decode/bf16_rows.cuh"
#include "kernels/cuda/decode/int2_pages.cuh"
#include "kernels/cuda/decode/kernels.h"
#include "kernels/cuda/decode/merge_splits.cuh"
#include "kernels/cuda/decode/rotate_query.cuh"

namespace crumb::kernels::cuda {

// Returns where the rotated query of a segment lies in the workspace.
template <class T>
__device__ __forceinline__ RotatedQuery RotatedOf(const DecodeKernelParams& k, int64_t segment) {
  return {k.workspace.q_fragment + segment * T::kFragmentWords,
          k.workspace.row_constant + segment * T::kRows * (1 + T::kGroups)};
}

// Runs one persistent block of the planned schedule, one per SM. Its shared memory holds the ring
// slots of all warps, their barriers, and a staging area of kPassRows rows that also holds the
// warps' states.
template <class T>
__device__ __forceinline__ void RunBlock(const DecodeKernelParams& k) {
  extern __shared__ __align__(128) char shared[];
  const int warp = threadIdx.x / 32;
  const uint32_t ring_bytes = k.launch.warps * k.launch.stages * k.launch.slot_bytes;
  const uint32_t barriers = ptx::SharedAddress(shared + ring_bytes);
  float* stage =
      reinterpret_cast<float*>(shared + ring_bytes + k.launch.warps * k.launch.stages * 8);
  const WorkRange mine =
      k.plan.work_ranges[blockIdx.x * (k.launch.warps / kWorkerWarps) + warp / kWorkerWarps];
  typename T::Ring ring(k,
                        ptx::SharedAddress(shared) + warp * k.launch.stages * k.launch.slot_bytes,
                        barriers + warp * k.launch.stages * 8);
  const Worker worker = mine.workers == 1
                            ? Worker{warp, k.launch.warps, 0}
                            : Worker{warp % kWorkerWarps, kWorkerWarps, warp / kWorkerWarps};

  // Loads complete in the order of issue: addresses come first, then the rotation, then tiles.
  ring.Prepare(k, worker, mine);
  QueryRotation<T> rotation(k, stage);
  if (mine.block_begin < mine.block_end) {
    rotation.Prefetch(mine.block_begin, mine.block_end, mine.block_head);
  }
  if (!k.p.overlap_previous) rotation.PrefetchQuery();
  // The previous kernel may write the newest rows of windows.
  const bool waits = k.p.overlap_previous && !ring.StartsWithTiles();
  if (!waits) ring.Start(k);
#if __CUDA_ARCH__ >= 900
  ptx::LaunchDependents();
  if (k.p.overlap_previous) {
    ptx::WaitForPrevious();
    if (waits) ring.Start(k);
    rotation.PrefetchQuery();
  }
#endif
  rotation.Run(mine.block_begin, mine.block_end);
  ring.Complete(k);
  if (k.p.rotation_v != nullptr && mine.block_begin < mine.block_end) {
    // R_V is prefetched into L2 for the end of the kernel, by one block of each problem.
    const Segment& first = k.plan.segments[mine.block_begin];
    if (first.int2_first == mine.block_begin || mine.block_end - mine.block_begin > 1) {
      const float* r = k.p.rotation_v + static_cast<int64_t>(first.head) * T::kDim * T::kDim;
#pragma unroll 1
      for (int i = 32 * threadIdx.x; i < T::kDim * T::kDim; i += 32 * blockDim.x) {
        ptx::PrefetchL2(r + i);
      }
    }
  }

  for (int index = mine.begin; index < mine.end; ++index) {
    const Segment segment = k.plan.segments[index];
    const int active = min(segment.end - segment.begin, worker.warps);
    SegmentState<T> state;
    if (worker.warp < active) {
      if (segment.kind == kSegmentInt2) {
        AttendInt2<T>(k, segment, RotatedOf<T>(k, index), worker, ring, state);
      } else {
        AttendBf16<T>(k, segment, worker, ring, state);
      }
    }
    StorePartial<T>(k, index, active, worker, ring.LastSlot(k), stage, state, [&] {
      ring.FenceWrites();
      ring.Fill(k);
    });
  }
  SplitMerger<T>(k, shared).Run(mine.block_begin, mine.block_end);
}

template <class T>
__global__ void __launch_bounds__(T::kThreadsMax, 1)
    DecodeKernel(const __grid_constant__ DecodeKernelParams k) {
#if __CUDA_ARCH__ >= 900
  constexpr bool kServed = true;
#else
  constexpr bool kServed = !T::kBulk;  // never launched on those devices
#endif
  if constexpr (kServed) RunBlock<T>(k);
}

// Returns the fast path kernel if there is one and it serves the call, else the general one.
template <class T>
auto KernelFor(const DecodeKernelParams& k) {
  if constexpr (T::kPlannedFastPath) {
    if (IsFastPath(k.p)) return DecodeKernel<FastPathTraits<T>>;
  }
  return DecodeKernel<T>;
}

// Enqueues DecodeKernel.
template <class T>
cudaError_t LaunchDecode(const DecodeKernelParams& k, cudaStream_t stream) {
  const auto kernel = KernelFor<T>(k);
  const cudaError_t error = cudaFuncSetAttribute(
      kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(k.launch.shared_bytes));
  if (error != cudaSuccess) return error;
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(k.launch.blocks);
  config.blockDim = dim3(32 * k.launch.warps);
  config.dynamicSmemBytes = k.launch.shared_bytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = k.p.overlap_previous ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, k);
}

// Returns the instance with or without bulk copies.
template <int dim, int groups, int query_tiles, bool interleaved>
DecodeLauncher Instance(bool bulk) {
  if (bulk) return LaunchDecode<DecodeTraits<dim, groups, query_tiles, interleaved, true>>;
  return LaunchDecode<DecodeTraits<dim, groups, query_tiles, interleaved, false>>;
}

template <int dim, int groups>
DecodeLauncher NarrowInstance(int query_rows, bool bulk) {
  if (query_rows <= 4) return Instance<dim, groups, 1, true>(bulk);
  if (query_rows <= 8) return Instance<dim, groups, 1, false>(bulk);
  return nullptr;
}

template <int dim, int groups>
DecodeLauncher WideInstance(int query_rows, bool bulk) {
  if (query_rows <= 12) return Instance<dim, groups, 2, true>(bulk);
  if (query_rows <= 16) return Instance<dim, groups, 2, false>(bulk);
  return nullptr;
}

// Instantiate one instance, within the namespace of this file: CMakeLists.txt lists them.
#define CRUMB_DECODE_NARROW(dim, groups) \
  template DecodeLauncher NarrowInstance<dim, groups>(int, bool);
#define CRUMB_DECODE_WIDE(dim, groups) template DecodeLauncher WideInstance<dim, groups>(int, bool);

}  // namespace crumb::kernels::cuda
