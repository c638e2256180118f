// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "kernels/cuda/prefill/bf16_rows.cuh"
#include "kernels/cuda/prefill/dispatch.h"
#include "kernels/cuda/prefill/int2_pages.cuh"
#include "kernels/cuda/prefill/launch.cuh"
#include "kernels/cuda/prefill/query.cuh"

namespace crumb::kernels::cuda::prefill {

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

template <class T>
cudaError_t Launch(const PrefillAttentionParams& p, cudaStream_t stream) {
  constexpr int kBytes = static_cast<int>(sizeof(Shared<T>));
  static_assert(kBytes <= 113 * 1024, "two blocks a multiprocessor");
  return LaunchKernel<T>(PrefillKernel<T>, T::kThreads, kBytes, p, stream);
}

// Tiles of 8 query rows per warp in the mma.sync path: 32 query rows if registers hold their
// outputs, else 16.
template <int dim, int groups>
inline constexpr int kWarpQueryTiles = dim <= 128 && groups == 1 ? 4 : 2;

template <int dim, int groups>
cudaError_t LaunchPrefill(const PrefillAttentionParams& params, cudaStream_t stream,
                          PrefillMma mma) {
  if constexpr (groups <= 4) {
    if (mma == PrefillMma::kAuto) {
      bool launched = false;
      const cudaError_t error = LaunchWgmmaPrefill<dim, groups>(params, stream, &launched);
      if (error != cudaSuccess || launched) return error;
    }
  }
  return Launch<Traits<dim, groups, kWarpQueryTiles<dim, groups>>>(params, stream);
}

#define CRUMB_PREFILL(dim, groups)                                                             \
  template cudaError_t LaunchPrefill<dim, groups>(const PrefillAttentionParams&, cudaStream_t, \
                                                  PrefillMma);

}  // namespace crumb::kernels::cuda::prefill
