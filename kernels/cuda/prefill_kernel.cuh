// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_bf16.h>

#include <algorithm>
#include <cstdint>

#include "kernels/cuda/prefill_bf16.cuh"
#include "kernels/cuda/prefill_int2.cuh"
#include "kernels/cuda/prefill_query.cuh"
#include "kernels/cuda/prefill_team.cuh"
#include "kernels/cuda/prefill_team_pages.cuh"
#include "kernels/cuda/prefill_team_rows.cuh"

namespace crumb::kernels::cuda::prefill {

// Which query row each column is.
template <class T>
__device__ __forceinline__ void NameColumns(const PrefillAttentionParams& p, const Block<T>& block,
                                            int* tokens, int* rows, float* bias) {
  for (int i = threadIdx.x; i < T::kBlockColumns; i += T::kThreads) {
    const bool exists = i < block.columns;
    const int64_t column = block.first_column + (exists ? i : 0);
    const int token = static_cast<int>(column / block.heads);
    const int head = block.head * block.heads + static_cast<int>(column % block.heads);
    tokens[i] = token;
    rows[i] = exists ? (block.begin + token) * p.shape.q_heads + head : -1;
    bias[i] = 0.0f;
  }
}

// Divides by the softmax sums and writes the warp's rows.
template <class T>
__device__ __forceinline__ void WriteRows(const PrefillAttentionParams& p, const Shared<T>& shared,
                                          int warp, int lane, State<T>& state) {
  const int r = lane / 4, c = lane % 4;
#pragma unroll
  for (int i = 0; i < T::kLaneColumns; ++i) {
    const int row = shared.row[warp][8 * (i / 2) + 2 * c + i % 2];
    float sum = SumOverRows(state.sum[i]), reference = state.reference[i], factor = 1.0f;
    if (p.sink_logit != nullptr && row >= 0) {
      const float logit = p.sink_logit[row % p.shape.q_heads] * kLog2E;
      const bool known = state.seen >> i & 1;
      const float top = known ? fmaxf(reference, logit) : logit;
      factor = known ? ptx::Exp2(reference - top) : 0.0f;
      sum = sum * factor + ptx::Exp2(logit - top);
      reference = top;
    }
    const float unit = sum > 0.0f ? factor / sum : sum == 0.0f ? 0.0f : NAN;
#pragma unroll
    for (int m = 0; m < T::kSteps; ++m) {
      state.out[i / 2][m][i % 2] *= unit;
      state.out[i / 2][m][2 + i % 2] *= unit;
    }
    if (p.lse != nullptr && row >= 0 && r == 0) p.lse[row] = (reference + log2f(sum)) * kLn2;
  }
#pragma unroll
  for (int n = 0; n < T::kColumnTiles; ++n) {
    if (p.out_type == OutType::kBf16) {
      const int row = shared.row[warp][8 * n + r];
      uint32_t* to =
          static_cast<uint32_t*>(p.out) + static_cast<int64_t>(max(row, 0)) * (T::kDim / 2) + c;
#pragma unroll
      for (int m = 0; m < T::kSteps; ++m) {
#pragma unroll
        for (int a = 0; a < 2; ++a) {
          const uint32_t pair = ptx::TransposeMatrix(
              ptx::PackBf16(state.out[n][m][2 * a], state.out[n][m][2 * a + 1]));
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

// The first page that a column of the block attends.
template <class T>
__device__ __forceinline__ int FirstPage(const PrefillAttentionParams& p, const Block<T>& block) {
  const int skipped =
      (block.FirstPosition(p, block.first_token) - block.sink) / T::kTokens;  // whole pages
  return min(max(skipped, 0), block.pages);
}

// Products of one warp: every device, every call.
template <class T>
__device__ __forceinline__ void PrefillByWarps(const PrefillAttentionParams& p,
                                               const Block<T>& block, Shared<T>& shared) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const bool active = warp * T::kColumns < block.columns;
  NameColumns<T>(p, block, shared.token[0], shared.row[0], shared.bias[0]);
  __syncthreads();
  State<T> state;
  if (active) LoadPlainQuery<T>(p, shared, warp, lane);

  // History, in its own basis.
  const int begin = FirstPage<T>(p, block);
  if (begin < block.pages) {
    float factor = 0.0f;
    if (active) factor = PrepareQuery<T>(p, block, shared, warp, lane, state);
    state.Clear();
    if (p.soft_cap > 0.0f || p.window > 0) {
      AttendPages<T, false>(p, block, begin, factor, shared, warp, lane, state);
    } else {
      AttendPages<T, true>(p, block, begin, factor, shared, warp, lane, state);
    }
    if (active) {
      if (p.rotation_v != nullptr) {
        TurnBack<T>(p.rotation_v + static_cast<int64_t>(block.head) * T::kDim * T::kDim, shared,
                    warp, lane, state);
      }
      LoadPlainQuery<T>(p, shared, warp, lane);
    }
  } else {
    state.Clear();
  }

  // BF16 rows, in the model's basis.
  AttendRows<T>(p, block, shared, warp, lane, state);
  if (active) WriteRows<T>(p, shared, warp, lane, state);
}

template <class T>
__global__ void __launch_bounds__(T::kThreads, 2)
    PrefillKernel(const __grid_constant__ PrefillAttentionParams p) {
  extern __shared__ __align__(1024) char storage[];
  const Block<T> block(p);
  if (block.columns <= 0) return;
  PrefillByWarps<T>(p, block, *reinterpret_cast<Shared<T>*>(storage));
}

// Products of four warps where the device has them: no caps, no window.
template <class T>
__global__ void __launch_bounds__(T::kThreads, 2)
    TeamPrefillKernel(const __grid_constant__ PrefillAttentionParams p) {
  extern __shared__ __align__(1024) char storage[];
  const Block<T> block(p);
  if (block.columns <= 0) return;
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  TeamShared<T>& shared = *reinterpret_cast<TeamShared<T>*>(storage);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  NameColumns<T>(p, block, shared.token, shared.row, shared.bias);
  if (threadIdx.x < T::kBlockColumns) shared.terms[threadIdx.x][0] = 0.0f;
  __syncthreads();
  TeamState state;
  if (block.pages > 0) AttendPagesByTeam<T>(p, block, shared, warp, lane, state);
  AttendRowsByTeam<T>(p, block, shared, warp, lane, state);
  WriteTeamRows<T>(p, shared, warp, lane, state);
#else
  PrefillByWarps<T>(p, block, *reinterpret_cast<Shared<T>*>(storage));
#endif
}

template <class T>
cudaError_t LaunchKernel(void (*kernel)(PrefillAttentionParams), int bytes,
                         const PrefillAttentionParams& p, cudaStream_t stream) {
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error != cudaSuccess) return error;
  const int64_t columns =
      static_cast<int64_t>(p.shape.fresh_max) * (p.shape.q_heads / p.shape.kv_heads);
  const dim3 grid(static_cast<unsigned>((columns + T::kBlockColumns - 1) / T::kBlockColumns),
                  static_cast<unsigned>(p.shape.kv_heads), static_cast<unsigned>(p.shape.batch));
  kernel<<<grid, T::kThreads, bytes, stream>>>(p);
  return cudaGetLastError();
}

template <class T>
cudaError_t Launch(const PrefillAttentionParams& p, cudaStream_t stream) {
  constexpr int kBytes = static_cast<int>(sizeof(Shared<T>));
  static_assert(kBytes <= 113 * 1024, "two blocks a multiprocessor");
  return LaunchKernel<T>(PrefillKernel<T>, kBytes, p, stream);
}

template <class T>
cudaError_t LaunchTeam(const PrefillAttentionParams& p, cudaStream_t stream) {
  constexpr int kBytes = static_cast<int>(std::max(sizeof(TeamShared<T>), sizeof(Shared<T>)));
  static_assert(kBytes <= 113 * 1024, "two blocks a multiprocessor");
  return LaunchKernel<T>(TeamPrefillKernel<T>, kBytes, p, stream);
}

// Whether the device has products of four warps: Hopper only.
inline cudaError_t HasTeamProducts(bool* has) {
  int device = 0, major = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  }
  *has = major == 9;
  return error;
}

}  // namespace crumb::kernels::cuda::prefill
