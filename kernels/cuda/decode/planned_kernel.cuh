// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kernels/cuda/decode/bf16_rows.cuh"
#include "kernels/cuda/decode/int2_pages.cuh"
#include "kernels/cuda/decode/merge_splits.cuh"
#include "kernels/cuda/decode/rotate_query.cuh"

namespace crumb::kernels::cuda {

// Where the block's rotation leaves a segment's query.
template <class T>
__device__ __forceinline__ RotatedQuery RotatedOf(const DecodeKernelParams& k, int64_t segment) {
  return {k.workspace.q_fragment + segment * T::kFragmentWords,
          k.workspace.row_constant + segment * T::kRows * (1 + T::kGroups)};
}

// One block per multiprocessor. Shared memory: ring slots of all warps, their barriers, and a
// staging area of kPassRows rows that also holds the warps' states.
template <class T>
__device__ __forceinline__ void RunBlock(const DecodeKernelParams& k) {
  extern __shared__ __align__(128) char shared[];
  const int warp = threadIdx.x / 32;
  const uint32_t ring_bytes = k.launch.warps * k.launch.stages * k.launch.slot_bytes;
  const uint32_t barriers = ptx::SharedAddress(shared + ring_bytes);
  float* stage =
      reinterpret_cast<float*>(shared + ring_bytes + k.launch.warps * k.launch.stages * 8);
  const GroupShare mine =
      k.plan.shares[blockIdx.x * (k.launch.warps / kGroupWarps) + warp / kGroupWarps];
  typename T::Ring ring(k,
                        ptx::SharedAddress(shared) + warp * k.launch.stages * k.launch.slot_bytes,
                        barriers + warp * k.launch.stages * 8);
  const WarpGroup group = mine.groups == 1
                              ? WarpGroup{warp, k.launch.warps, 0}
                              : WarpGroup{warp % kGroupWarps, kGroupWarps, warp / kGroupWarps};

  // What is asked for first arrives first: addresses, then the rotation, then tiles.
  ring.Prepare(k, group, mine);
  QueryRotation<T> rotation(k, stage);
  if (mine.block_begin < mine.block_end) {
    rotation.Prefetch(mine.block_begin, mine.block_end, mine.block_head);
  }
  if (!k.p.overlap_previous) rotation.PrefetchQuery();
  // The kernel before may write the newest rows of windows.
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
    // The end will want R_V; it arrives in L2 meanwhile. One block of a pair asks for it.
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
    const int active = min(segment.end - segment.begin, group.warps);
    SegmentState<T> state;
    if (group.warp < active) {
      if (segment.kind == kSegmentInt2) {
        AttendInt2<T>(k, segment, RotatedOf<T>(k, index), group, ring, state);
      } else {
        AttendBf16<T>(k, segment, group, ring, state);
      }
    }
    StorePartial<T>(k, index, active, group, ring.LastSlot(k), stage, state, [&] {
      ring.FenceWrites();
      ring.Fill(k);
    });
  }
  PairFinish<T>(k, shared).Run(mine.block_begin, mine.block_end);
}

template <class T>
__global__ void __launch_bounds__(T::kThreadsMax, 1)
    DecodeKernel(const __grid_constant__ DecodeKernelParams k) {
#if __CUDA_ARCH__ >= 900
  constexpr bool kServed = true;
#else
  constexpr bool kServed = !T::kBulk;  // never launched there
#endif
  if constexpr (kServed) RunBlock<T>(k);
}

// That of PlainTraits where there is one and it serves the call.
template <class T>
auto KernelFor(const DecodeKernelParams& k) {
  if constexpr (T::kPlainPlanned) {
    if (IsPlain(k.p)) return DecodeKernel<PlainTraits<T>>;
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

}  // namespace crumb::kernels::cuda
