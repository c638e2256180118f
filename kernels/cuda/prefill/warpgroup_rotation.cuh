// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "kernels/cuda/prefill/warpgroup.cuh"

// Rotation of a consumer warpgroup's query rows before the pages, and inverse rotation of its
// output after them, both by wgmma with R in shared memory as two bf16 parts.
namespace crumb::kernels::cuda::prefill {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// Loads the warpgroup's query rows to shared memory. Rows that do not exist are zero.
template <class T>
__device__ __forceinline__ void LoadWarpgroupQuery(const PrefillAttentionParams& p,
                                                   const WarpgroupShared<T>& shared,
                                                   const Warpgroup& warpgroup, char* to) {
  constexpr int kPieces = T::kDim / 8;
#pragma unroll
  for (int k = 0; k < WarpgroupTraits<T>::kQueryRows * kPieces / T::kThreads; ++k) {
    const int i = k * T::kThreads + warpgroup.thread, query = i / kPieces, piece = i % kPieces;
    const int row = shared.row[query];
    uint4 x = make_uint4(0, 0, 0, 0);
    if (row >= 0) {
      x = static_cast<const uint4*>(p.q)[static_cast<int64_t>(row) * kPieces + piece];
    }
    *reinterpret_cast<uint4*>(to + piece / 8 * WarpgroupTraits<T>::kMatrixBytes +
                              query * WarpgroupTraits<T>::kLineBytes + ((piece ^ query) % 8) * 16) =
        x;
  }
}

// Loads R as operand B in two bf16 parts: column n is R[n] or, if kTransposed, R[k][n] over k. Both
// consumer warpgroups call it.
template <class T, bool kTransposed>
__device__ __forceinline__ void LoadRotation(const float* rotation, WgmmaShared<T>& shared) {
  constexpr int kPieces = T::kDim / 8;
#pragma unroll 2
  for (int i = threadIdx.x; i < T::kDim * kPieces;
       i += WarpgroupTraits<T>::kConsumers * T::kThreads) {
    const int line = kTransposed ? i % T::kDim : i / kPieces;
    const int piece = kTransposed ? i / T::kDim : i % kPieces;
    float x[8];
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      x[k] = __ldg(kTransposed ? rotation + (8 * piece + k) * T::kDim + line
                               : rotation + line * T::kDim + 8 * piece + k);
    }
    uint32_t high[4], low[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) ptx::SplitBf16(x[2 * k], x[2 * k + 1], &high[k], &low[k]);
    const int at = ((piece ^ line) % 8) * 16;
    *reinterpret_cast<uint4*>(shared.rotation[0][piece / 8][line] + at) =
        make_uint4(high[0], high[1], high[2], high[3]);
    *reinterpret_cast<uint4*>(shared.rotation[1][piece / 8][line] + at) =
        make_uint4(low[0], low[1], low[2], low[3]);
  }
}

// Returns the descriptor of R's part `part` from inner channel 16 step on.
template <class T>
__device__ __forceinline__ uint64_t RotationAt(const WgmmaShared<T>& shared, int part, int step) {
  return Matrix(shared.rotation[part][step / 4][0]) + step % 4 * 2;
}

// rotated = q R_K. Leaves the query in shared.query.
template <class T>
__device__ __forceinline__ void RotateWarpgroupQuery(const PrefillAttentionParams& p,
                                                     const Block<T>& block, WgmmaShared<T>& shared,
                                                     const Warpgroup& warpgroup,
                                                     float (&rotated)[16][4]) {
  char* query = shared.query[warpgroup.index][0];
  LoadWarpgroupQuery<T>(p, shared.warpgroup[warpgroup.index], warpgroup, query);
  if (p.rotation_k == nullptr) {
    warpgroup.Sync();
#pragma unroll
    for (int n = 0; n < 16; ++n) {
#pragma unroll
      for (int a = 0; a < 2; ++a) {
        const int row = warpgroup.Query(a);
        const uint32_t pair = *reinterpret_cast<const uint32_t*>(
            query + n / 8 * WarpgroupTraits<T>::kMatrixBytes +
            row * WarpgroupTraits<T>::kLineBytes + ((n ^ row) % 8) * 16 + warpgroup.lane % 4 * 4);
        rotated[n][2 * a] = ptx::LowBf16(pair);
        rotated[n][2 * a + 1] = ptx::HighBf16(pair);
      }
    }
    return;
  }
  LoadRotation<T, true>(p.rotation_k + static_cast<int64_t>(block.head) * T::kDim * T::kDim,
                        shared);
  ptx::FenceCopyEngine();
  SyncConsumers();
  const uint64_t a = Matrix(query);
  ptx::FenceWgmma();
#pragma unroll
  for (int part = 1; part >= 0; --part) {
#pragma unroll
    for (int s = 0; s < T::kSteps; ++s) {
      ptx::WgmmaBf16Shared(rotated, a + s / 4 * (WarpgroupTraits<T>::kMatrixBytes / 16) + s % 4 * 2,
                           RotationAt<T>(shared, part, s), part == 0 || s > 0);
    }
  }
  ptx::CommitWgmma();
  ptx::WaitWgmma();
  ptx::TakeWgmmaResults(rotated);
}

// Stores the sums of q' of the lane's query row `a` for the keys' constants. A lane stores a group.
template <class T>
__device__ __forceinline__ void StoreSums(const float (&sum)[T::kGroups][2], int a,
                                          WarpgroupShared<T>& shared, const Warpgroup& warpgroup) {
  const int y = warpgroup.lane % 4;
  float own = 0.0f;
#pragma unroll
  for (int i = 0; i < T::kGroups; ++i) own = i == y ? sum[i][a] : own;
  uint32_t first, rest;
  SplitHalf(own, own, &first, &rest);
  char* row = shared.sums[0] + ConstantsRow(warpgroup.Query(a)) + ConstantsOffset(y);
  *reinterpret_cast<uint2*>(row) = make_uint2(__byte_perm(first, rest, 0x5410), first & 0xffff);
}

// Prepares q' of the warpgroup's query rows as operands in one or two fp16 parts, and sets `sum` to
// its sums over each group's channels. q' is in log2 units, times 2^exponent (the same for both
// warpgroups); if kExact, divided by the power of two that CodePair multiplies a channel's codes
// with.
template <class T>
__device__ __forceinline__ void PrepareWarpgroupQuery(const PrefillAttentionParams& p,
                                                      const Block<T>& block, WgmmaShared<T>& shared,
                                                      const Warpgroup& warpgroup,
                                                      float (&sum)[T::kGroups][2]) {
  float rotated[16][4];
  RotateWarpgroupQuery<T>(p, block, shared, warpgroup, rotated);
  const float factor = block.scale * kLog2E;
  float most = 0.0f;
#pragma unroll
  for (int n = 0; n < 16; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) most = fmaxf(most, fabsf(rotated[n][i]) * factor);
  }
  for (int step = 1; step < 32; step *= 2) {
    most = fmaxf(most, __shfl_xor_sync(~0u, most, step));
  }
  if (warpgroup.lane == 0) shared.most[T::kWarps * warpgroup.index + warpgroup.warp] = most;
  SyncConsumers();
#pragma unroll
  for (const float other : shared.most) most = fmaxf(most, other);
  const int exponent = QueryExponent(most);
#pragma unroll
  for (int y = 0; y < T::kGroups; ++y) sum[y][0] = sum[y][1] = 0.0f;
  char(&operands)[WarpgroupTraits<T>::kOperands][WarpgroupTraits<T>::kMatrixBytes] =
      shared.warpgroup[warpgroup.index].operands;
#pragma unroll
  for (int n = 0; n < 16; n += 2) {
    float(&own)[2] = sum[n * T::kGroups / 16];
    uint32_t high[4], low[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      // The index of a channel's pair in its word is that of its eight channels.
      const float unit = T::kExact ? PowerOfTwo(CodeShift((n + i / 2) % 8)) : 1.0f;
      const float f = factor * PowerOfTwo(exponent) / unit;
      const float(&x)[4] = rotated[n + i / 2];
      SplitHalf(x[2 * (i % 2)] * f, x[2 * (i % 2) + 1] * f, &high[i], &low[i]);
      if constexpr (T::kExact) {
        own[i % 2] = fmaf(ptx::LowHalf(high[i]) + ptx::LowHalf(low[i]), unit, own[i % 2]);
        own[i % 2] = fmaf(ptx::HighHalf(high[i]) + ptx::HighHalf(low[i]), unit, own[i % 2]);
      } else {
        // Keys are centred without their constants, so the constants multiply the exact sum.
        own[i % 2] += x[2 * (i % 2)] * f + x[2 * (i % 2) + 1] * f;
      }
    }
    ptx::StoreMatrices(LineAddress<T>(operands[n / 8], n % 8, warpgroup), high);
    if constexpr (T::kQueryParts == 2) {
      ptx::StoreMatrices(LineAddress<T>(operands[2 + n / 8], n % 8, warpgroup), low);
    }
  }
#pragma unroll
  for (int a = 0; a < 2; ++a) {
#pragma unroll
    for (int y = 0; y < T::kGroups; ++y) {
      sum[y][a] = SumOverQuad(sum[y][a]) * (T::kExact ? PowerOfTwo(-exponent) : 1.0f);
    }
    if constexpr (!T::kExact) StoreSums<T>(sum, a, shared.warpgroup[warpgroup.index], warpgroup);
  }
}

// out = R_V out + the softmax's mass times the mean, where `unit` scales out first. Both consumer
// warpgroups call it.
template <class T>
__device__ __forceinline__ void InverseRotateWarpgroup(const PrefillAttentionParams& p,
                                                       const Block<T>& block, float unit,
                                                       WgmmaShared<T>& shared,
                                                       const Warpgroup& warpgroup,
                                                       WgmmaState& state) {
  if (p.rotation_v != nullptr) {
    LoadRotation<T, false>(p.rotation_v + static_cast<int64_t>(block.head) * T::kDim * T::kDim,
                           shared);
  }
  const float mass[2] = {SumOverQuad(state.sum[0]), SumOverQuad(state.sum[1])};
  const float* mean =
      p.mean_v != nullptr ? p.mean_v + block.head * T::kDim + 2 * (warpgroup.lane % 4) : nullptr;
#pragma unroll
  for (int n = 0; n < 16; ++n) {
    float2 x = make_float2(0.0f, 0.0f);
    if (mean != nullptr) x = __ldg(reinterpret_cast<const float2*>(mean + 8 * n));
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      state.out[n][i] = fmaf(state.out[n][i], unit, (i % 2 == 0 ? x.x : x.y) * mass[i / 2]);
    }
  }
  if (p.rotation_v == nullptr) return;
  uint32_t high[T::kSteps][4], low[T::kSteps][4];
#pragma unroll
  for (int s = 0; s < T::kSteps; ++s) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float(&x)[4] = state.out[2 * s + i / 2];
      ptx::SplitBf16(x[2 * (i % 2)], x[2 * (i % 2) + 1], &high[s][i], &low[s][i]);
    }
  }
#pragma unroll
  for (int n = 0; n < 16; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) state.out[n][i] = 0.0f;
  }
  ptx::FenceCopyEngine();
  SyncConsumers();
  ptx::FenceWgmma();
#pragma unroll
  for (int s = 0; s < T::kSteps; ++s) {
    const uint64_t b = RotationAt<T>(shared, 0, s);
    ptx::WgmmaBf16<16>(state.out, high[s], RotationAt<T>(shared, 1, s));
    ptx::WgmmaBf16<16>(state.out, low[s], b);
    ptx::WgmmaBf16<16>(state.out, high[s], b);
  }
  ptx::CommitWgmma();
  ptx::WaitWgmma();
  ptx::TakeWgmmaResults(state.out);
}

#endif

}  // namespace crumb::kernels::cuda::prefill
