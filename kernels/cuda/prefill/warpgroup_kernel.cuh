// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "kernels/cuda/prefill/dispatch.h"
#include "kernels/cuda/prefill/launch.cuh"
#include "kernels/cuda/prefill/warpgroup.cuh"
#include "kernels/cuda/prefill/warpgroup_pages.cuh"
#include "kernels/cuda/prefill/warpgroup_rows.cuh"
#include "kernels/cuda/prefill/warpgroup_unpack.cuh"

namespace crumb::kernels::cuda::prefill {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
// Consumer warpgroup: attends its query rows over pages and BF16 rows and writes them.
template <class T>
__device__ __forceinline__ void PrefillByWgmma(const PrefillAttentionParams& p,
                                               const Block<T>& block, WgmmaShared<T>& block_shared,
                                               WgmmaBarriers<T>& barriers) {
  const Warpgroup warpgroup(block);
  WarpgroupShared<T>& shared = block_shared.warpgroup[warpgroup.index];
  if (warpgroup.thread < WarpgroupTraits<T>::kQueryRows) {
    const int i = warpgroup.thread;
    AssignQueryRow<T>(p, block, WarpgroupTraits<T>::kQueryRows * warpgroup.index + i,
                      &shared.token[i], &shared.row[i]);
    for (float(&bias)[WarpgroupTraits<T>::kQueryRows] : shared.bias) bias[i] = 0.0f;
  }
  warpgroup.Sync();
  WgmmaState<T> state;
  if (block.pages > 0) AttendPagesByWgmma<T>(p, block, block_shared, barriers, warpgroup, state);
  SignalProducers<T>();  // buffers that BF16 rows are copied to are free
  RowConsumer<T>(p, block, block_shared, barriers, warpgroup, state).Attend();
  WriteWarpgroupRows<T>(p, shared, warpgroup, state);
}

// Producer warps: bring K or V of all tokens to shared memory for both consumer warpgroups.
template <class T>
__device__ __forceinline__ void ProduceTokens(const PrefillAttentionParams& p,
                                              const Block<T>& block, bool value,
                                              WgmmaShared<T>& shared, WgmmaBarriers<T>& barriers) {
  if (block.pages > 0) ProducePages<T>(p, block, value, shared, barriers);
  WaitForConsumers<T>(value);
  RowProducer<T>(p, block, value, shared, barriers).Run();
}
#endif

// The wgmma path, without soft cap and sliding window. The kernel is empty for devices other than
// sm_90a (RunsWgmma).
template <class T>
__global__ void __launch_bounds__(WarpgroupTraits<T>::kThreads, 1)
    WgmmaPrefillKernel([[maybe_unused]] const __grid_constant__ PrefillAttentionParams p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) char storage[];
  __shared__ WgmmaBarriers<T> barriers;
  const Block<T> block(p);
  if (block.query_rows <= 0) return;
  WgmmaShared<T>& shared = *reinterpret_cast<WgmmaShared<T>*>(storage);
  if (threadIdx.x == 0) InitWgmmaBarriers<T>(block, barriers);
  __syncthreads();
  constexpr int kConsumerThreads = WarpgroupTraits<T>::kConsumers * T::kThreads;
  if (threadIdx.x >= kConsumerThreads) {
    ptx::ReleaseRegisters<WarpgroupTraits<T>::kProducerRegisters>();
    ProduceTokens<T>(p, block, threadIdx.x >= kConsumerThreads + T::kThreads, shared, barriers);
  } else {
    ptx::AcquireRegisters<WarpgroupTraits<T>::kConsumerRegisters>();
    PrefillByWgmma<T>(p, block, shared, barriers);
  }
#endif
}

template <class T>
cudaError_t LaunchWgmma(const PrefillAttentionParams& p, cudaStream_t stream) {
  constexpr int kBytes = static_cast<int>(sizeof(WgmmaShared<T>));
  static_assert(kBytes + 1024 <= 227 * 1024, "what a block of Hopper can have");
  return LaunchKernel<T>(WgmmaPrefillKernel<T>, WarpgroupTraits<T>::kThreads, kBytes, p, stream);
}

// Returns in *runs whether the loaded machine code is for sm_90a and the device runs it: only then
// the kernel uses static shared memory.
template <class T>
cudaError_t RunsWgmma(bool* runs) {
  cudaFuncAttributes attributes{};
  const cudaError_t error = cudaFuncGetAttributes(&attributes, WgmmaPrefillKernel<T>);
  *runs = attributes.sharedSizeBytes > 0;
  return error;
}

template <class T>
cudaError_t LaunchIfWgmma(const PrefillAttentionParams& params, cudaStream_t stream,
                          bool* launched) {
  const cudaError_t error = RunsWgmma<T>(launched);
  return error == cudaSuccess && *launched ? LaunchWgmma<T>(params, stream) : error;
}

// Chooses the variant: fp32 outputs are computed exactly, with head_dim 128, for groups of 128 and
// 64 channels and without a soft cap, which the variant for BF16 outputs has.
template <int dim, int groups>
cudaError_t LaunchWgmmaPrefill(const PrefillAttentionParams& params, cudaStream_t stream,
                               bool* launched) {
  *launched = false;
  if (params.window > 0) return cudaSuccess;
  const bool capped = params.soft_cap > 0.0f;
  if (params.out_type == OutType::kF32) {
    if constexpr (dim == 128 && groups <= 2) {
      if (!capped) {
        return LaunchIfWgmma<WgmmaTraits<dim, groups, true, false>>(params, stream, launched);
      }
    }
    return cudaSuccess;
  }
  return capped ? LaunchIfWgmma<WgmmaTraits<dim, groups, false, true>>(params, stream, launched)
                : LaunchIfWgmma<WgmmaTraits<dim, groups, false, false>>(params, stream, launched);
}

#define CRUMB_WGMMA_PREFILL(dim, groups)                                              \
  template cudaError_t LaunchWgmmaPrefill<dim, groups>(const PrefillAttentionParams&, \
                                                       cudaStream_t, bool*);

}  // namespace crumb::kernels::cuda::prefill
