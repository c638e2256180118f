// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "kernels/cuda/prefill/bf16_rows.cuh"
#include "kernels/cuda/prefill/dispatch.h"
#include "kernels/cuda/prefill/int2_pages.cuh"
#include "kernels/cuda/prefill/query.cuh"
#include "kernels/cuda/prefill/warpgroup.cuh"
#include "kernels/cuda/prefill/warpgroup_pages.cuh"
#include "kernels/cuda/prefill/warpgroup_rows.cuh"
#include "kernels/cuda/prefill/warpgroup_unpack.cuh"

namespace crumb::kernels::cuda::prefill {

// Sets token and row of the block's query row `i`.
template <class T>
__device__ __forceinline__ void AssignQueryRow(const PrefillAttentionParams& p,
                                               const Block<T>& block, int i, int* token, int* row) {
  const bool exists = i < block.query_rows;
  const int64_t query_row = block.first_query_row + (exists ? i : 0);
  const int head = block.head * block.heads + static_cast<int>(query_row % block.heads);
  *token = static_cast<int>(query_row / block.heads);
  *row = exists ? (block.begin + *token) * p.shape.q_heads + head : -1;
}

// Divides by the softmax sums and writes the warp's rows.
template <class T>
__device__ __forceinline__ void WriteRows(const PrefillAttentionParams& p, const Shared<T>& shared,
                                          int warp, int lane, State<T>& state) {
  const int r = lane / 4, c = lane % 4;
#pragma unroll
  for (int i = 0; i < T::kLaneQueryRows; ++i) {
    const int row = shared.row[warp][8 * (i / 2) + 2 * c + i % 2];
    float sum = SumOverRows(state.sum[i]), running_max = state.running_max[i], factor = 1.0f;
    if (p.sink_logit != nullptr && row >= 0) {
      const float logit = p.sink_logit[row % p.shape.q_heads] * kLog2E;
      const bool known = state.seen >> i & 1;
      const float top = known ? fmaxf(running_max, logit) : logit;
      factor = known ? ptx::Exp2(running_max - top) : 0.0f;
      sum = sum * factor + ptx::Exp2(logit - top);
      running_max = top;
    }
    const float unit = sum > 0.0f ? factor / sum : sum == 0.0f ? 0.0f : NAN;
#pragma unroll
    for (int m = 0; m < T::kSteps; ++m) {
      state.out[i / 2][m][i % 2] *= unit;
      state.out[i / 2][m][2 + i % 2] *= unit;
    }
    if (p.lse != nullptr && row >= 0 && r == 0) p.lse[row] = (running_max + log2f(sum)) * kLn2;
  }
#pragma unroll
  for (int n = 0; n < T::kQueryTiles; ++n) {
    if (p.out_type != OutType::kF32) {
      const int row = shared.row[warp][8 * n + r];
      uint32_t* to =
          static_cast<uint32_t*>(p.out) + static_cast<int64_t>(max(row, 0)) * (T::kDim / 2) + c;
#pragma unroll
      for (int m = 0; m < T::kSteps; ++m) {
#pragma unroll
        for (int a = 0; a < 2; ++a) {
          const float x = state.out[n][m][2 * a], y = state.out[n][m][2 * a + 1];
          const uint32_t pair = ptx::TransposeMatrix(ptx::PackBf16(x, y));
          if (row >= 0) to[8 * m + 4 * a] = pair;
        }
      }
    } else {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int row = shared.row[warp][8 * n + 2 * c + e];
        if (row < 0) continue;
        float* to = static_cast<float*>(p.out) + static_cast<int64_t>(row) * T::kDim + r;
#pragma unroll
        for (int m = 0; m < T::kSteps; ++m) {
          to[16 * m] = state.out[n][m][e];
          to[16 * m + 8] = state.out[n][m][2 + e];
        }
      }
    }
  }
}

// Returns the first page that any query row of the block attends.
template <class T>
__device__ __forceinline__ int FirstPage(const PrefillAttentionParams& p, const Block<T>& block) {
  const int skipped =
      (block.FirstPosition(p, block.first_token) - block.sink) / T::kTokens;  // whole pages
  return min(max(skipped, 0), block.pages);
}

// The mma.sync path. It supports every device and every call.
template <class T>
__device__ __forceinline__ void PrefillByWarps(const PrefillAttentionParams& p,
                                               const Block<T>& block, Shared<T>& shared) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const bool active = warp * T::kQueryRows < block.query_rows;
  for (int i = threadIdx.x; i < T::kBlockQueryRows; i += T::kThreads) {
    AssignQueryRow<T>(p, block, i, &shared.token[0][i], &shared.row[0][i]);
    shared.bias[0][i] = 0.0f;
  }
  __syncthreads();
  State<T> state;
  if (active) LoadQueryRows<T>(p, shared, warp, lane);

  // The history is attended in its rotated basis.
  const int begin = FirstPage<T>(p, block);
  if (begin < block.pages) {
    if (active) PrepareQuery<T>(p, block, shared, warp, lane, state);
    state.Clear();
    if (p.soft_cap > 0.0f || p.window > 0) {
      AttendPages<T, false>(p, block, begin, shared, warp, lane, state);
    } else {
      AttendPages<T, true>(p, block, begin, shared, warp, lane, state);
    }
    if (active) {
      if (p.rotation_v != nullptr) {
        InverseRotate<T>(p.rotation_v + static_cast<int64_t>(block.head) * T::kDim * T::kDim,
                         shared, warp, lane, state);
      }
      LoadQueryRows<T>(p, shared, warp, lane);
    }
  } else {
    state.Clear();
  }

  // BF16 rows are attended in the model's basis.
  AttendRows<T>(p, block, shared, warp, lane, state);
  if (active) WriteRows<T>(p, shared, warp, lane, state);
}

template <class T>
__global__ void __launch_bounds__(T::kThreads, 2)
    PrefillKernel(const __grid_constant__ PrefillAttentionParams p) {
  extern __shared__ __align__(1024) char storage[];
  const Block<T> block(p);
  if (block.query_rows <= 0) return;
  PrefillByWarps<T>(p, block, *reinterpret_cast<Shared<T>*>(storage));
}

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
  WgmmaState state;
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
cudaError_t LaunchKernel(void (*kernel)(PrefillAttentionParams), int threads, int bytes,
                         const PrefillAttentionParams& p, cudaStream_t stream) {
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error != cudaSuccess) return error;
  const int64_t query_rows =
      static_cast<int64_t>(p.shape.fresh_max) * (p.shape.q_heads / p.shape.kv_heads);
  const dim3 grid(static_cast<unsigned>((query_rows + T::kBlockQueryRows - 1) / T::kBlockQueryRows),
                  static_cast<unsigned>(p.shape.kv_heads), static_cast<unsigned>(p.shape.batch));
  kernel<<<grid, threads, bytes, stream>>>(p);
  return cudaGetLastError();
}

template <class T>
cudaError_t Launch(const PrefillAttentionParams& p, cudaStream_t stream) {
  constexpr int kBytes = static_cast<int>(sizeof(Shared<T>));
  static_assert(kBytes <= 113 * 1024, "two blocks a multiprocessor");
  return LaunchKernel<T>(PrefillKernel<T>, T::kThreads, kBytes, p, stream);
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

// Tiles of 8 query rows per warp in the mma.sync path: 32 query rows if registers hold their
// outputs, else 16.
template <int dim, int groups>
inline constexpr int kWarpQueryTiles = dim <= 128 && groups == 1 ? 4 : 2;

template <int dim, int groups>
cudaError_t LaunchPrefill(const PrefillAttentionParams& params, cudaStream_t stream,
                          PrefillMma mma) {
  if constexpr (dim == 128 && groups <= 2) {
    if (mma == PrefillMma::kAuto && params.soft_cap <= 0.0f && params.window <= 0) {
      using T = Traits<dim, groups, 4>;
      bool wgmma = false;
      const cudaError_t error = RunsWgmma<T>(&wgmma);
      if (error != cudaSuccess) return error;
      if (wgmma) return LaunchWgmma<T>(params, stream);
    }
  }
  return Launch<Traits<dim, groups, kWarpQueryTiles<dim, groups>>>(params, stream);
}

#define CRUMB_PREFILL(dim, groups)                                                             \
  template cudaError_t LaunchPrefill<dim, groups>(const PrefillAttentionParams&, cudaStream_t, \
                                                  PrefillMma);

}  // namespace crumb::kernels::cuda::prefill
