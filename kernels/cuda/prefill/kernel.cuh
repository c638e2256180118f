// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "kernels/cuda/prefill/bf16_rows.cuh"
#include "kernels/cuda/prefill/int2_pages.cuh"
#include "kernels/cuda/prefill/query.cuh"
#include "kernels/cuda/prefill/warpgroup.cuh"
#include "kernels/cuda/prefill/warpgroup_pages.cuh"
#include "kernels/cuda/prefill/warpgroup_rows.cuh"

namespace crumb::kernels::cuda::prefill {

// Which query row column `i` of the block is.
template <class T>
__device__ __forceinline__ void NameColumn(const PrefillAttentionParams& p, const Block<T>& block,
                                           int i, int* token, int* row) {
  const bool exists = i < block.columns;
  const int64_t column = block.first_column + (exists ? i : 0);
  const int head = block.head * block.heads + static_cast<int>(column % block.heads);
  *token = static_cast<int>(column / block.heads);
  *row = exists ? (block.begin + *token) * p.shape.q_heads + head : -1;
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
  for (int i = threadIdx.x; i < T::kBlockColumns; i += T::kThreads) {
    NameColumn<T>(p, block, i, &shared.token[0][i], &shared.row[0][i]);
    shared.bias[0][i] = 0.0f;
  }
  __syncthreads();
  State<T> state;
  if (active) LoadPlainQuery<T>(p, shared, warp, lane);

  // History, in its own basis.
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

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
// A team's query rows: pages, BF16 rows, output.
template <class T>
__device__ __forceinline__ void PrefillByTeam(const PrefillAttentionParams& p,
                                              const Block<T>& block,
                                              TeamBlockShared<T>& block_shared,
                                              TeamBarriers<T>& barriers) {
  const Team team(block);
  TeamShared<T>& shared = block_shared.team[team.index];
  if (team.thread < TeamTraits<T>::kQueries) {
    const int i = team.thread;
    NameColumn<T>(p, block, TeamTraits<T>::kQueries * team.index + i, &shared.token[i],
                  &shared.row[i]);
    for (float(&bias)[TeamTraits<T>::kQueries] : shared.bias) bias[i] = 0.0f;
  }
  team.Sync();
  TeamState state;
  if (block.pages > 0) AttendPagesByTeam<T>(p, block, block_shared, barriers, team, state);
  LetBring<T>();  // what lies where BF16 rows come is free
  TeamRows<T>(p, block, block_shared, barriers, team, state).Attend();
  WriteTeamRows<T>(p, shared, team, state);
}

// Tokens for both teams: K or V.
template <class T>
__device__ __forceinline__ void BringTokens(const PrefillAttentionParams& p, const Block<T>& block,
                                            bool value, TeamBlockShared<T>& shared,
                                            TeamBarriers<T>& barriers) {
  if (block.pages > 0) BringTeamPages<T>(p, block, value, shared, barriers);
  WaitToBring<T>(value);
  TeamRowSource<T>(p, block, value, shared, barriers).Run();
}
#endif

// Products of four warps: no caps, no window. Empty where the device has none (RunsTeams).
template <class T>
__global__ void __launch_bounds__(TeamTraits<T>::kThreads, 1)
    TeamPrefillKernel([[maybe_unused]] const __grid_constant__ PrefillAttentionParams p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) char storage[];
  __shared__ TeamBarriers<T> barriers;
  const Block<T> block(p);
  if (block.columns <= 0) return;
  TeamBlockShared<T>& shared = *reinterpret_cast<TeamBlockShared<T>*>(storage);
  if (threadIdx.x == 0) InitTeamBarriers<T>(block, barriers);
  __syncthreads();
  constexpr int kTeamThreads = TeamTraits<T>::kTeams * T::kThreads;
  if (threadIdx.x >= kTeamThreads) {
    ptx::GiveRegisters<TeamTraits<T>::kBringRegisters>();
    BringTokens<T>(p, block, threadIdx.x >= kTeamThreads + T::kThreads, shared, barriers);
  } else {
    ptx::TakeRegisters<TeamTraits<T>::kRegisters>();
    PrefillByTeam<T>(p, block, shared, barriers);
  }
#endif
}

template <class T>
cudaError_t LaunchKernel(void (*kernel)(PrefillAttentionParams), int threads, int bytes,
                         const PrefillAttentionParams& p, cudaStream_t stream) {
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error != cudaSuccess) return error;
  const int64_t columns =
      static_cast<int64_t>(p.shape.fresh_max) * (p.shape.q_heads / p.shape.kv_heads);
  const dim3 grid(static_cast<unsigned>((columns + T::kBlockColumns - 1) / T::kBlockColumns),
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
cudaError_t LaunchTeam(const PrefillAttentionParams& p, cudaStream_t stream) {
  constexpr int kBytes = static_cast<int>(sizeof(TeamBlockShared<T>));
  static_assert(kBytes + 1024 <= 227 * 1024, "what a block of Hopper can have");
  return LaunchKernel<T>(TeamPrefillKernel<T>, TeamTraits<T>::kThreads, kBytes, p, stream);
}

// Whether the device runs products of four warps: it has them, and the build has its machine code.
template <class T>
cudaError_t RunsTeams(bool* runs) {
  cudaFuncAttributes attributes{};
  const cudaError_t error = cudaFuncGetAttributes(&attributes, TeamPrefillKernel<T>);
  *runs = attributes.sharedSizeBytes > 0;
  return error;
}

}  // namespace crumb::kernels::cuda::prefill
