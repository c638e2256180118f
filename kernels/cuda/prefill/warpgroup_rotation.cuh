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

// Multiplies rows by R, a part of its columns at a time: R is loaded as operand B in two bf16
// parts, column n is R[n] or, if kTransposed, R[k][n] over k. Both consumer warpgroups call it.
template <class T, bool kTransposed>
class RotationStream {
  using U = WarpgroupTraits<T>;
  static constexpr int kPieces = T::kDim / 8;

 public:
  // `rotation` is the KV head's.
  __device__ __forceinline__ RotationStream(const float* rotation, WgmmaShared<T>& shared)
      : rotation_(rotation), shared_(shared) {}

  // Loads the columns of a part. Waits for all that was stored to shared memory before.
  __device__ __forceinline__ void Load(int part) const {
    if (part > 0) SyncConsumers();  // both warpgroups have multiplied by the last part
#pragma unroll 2
    for (int i = threadIdx.x; i < U::kPartChannels * kPieces; i += U::kConsumers * T::kThreads) {
      const int line = kTransposed ? i % U::kPartChannels : i / kPieces;
      const int piece = kTransposed ? i / U::kPartChannels : i % kPieces;
      const int column = part * U::kPartChannels + line;
      float x[8];
#pragma unroll
      for (int k = 0; k < 8; ++k) {
        x[k] = __ldg(kTransposed ? rotation_ + (8 * piece + k) * T::kDim + column
                                 : rotation_ + column * T::kDim + 8 * piece + k);
      }
      uint32_t high[4], low[4];
#pragma unroll
      for (int k = 0; k < 4; ++k) ptx::SplitBf16(x[2 * k], x[2 * k + 1], &high[k], &low[k]);
      const int at = ((piece ^ line) % 8) * 16;
      *reinterpret_cast<uint4*>(shared_.basis.rotation[0][piece / 8][line] + at) =
          make_uint4(high[0], high[1], high[2], high[3]);
      *reinterpret_cast<uint4*>(shared_.basis.rotation[1][piece / 8][line] + at) =
          make_uint4(low[0], low[1], low[2], low[3]);
    }
    ptx::FenceCopyEngine();
    SyncConsumers();
  }

  // product += `rows` times the high (0) or low (1) bf16 part of the loaded columns, or = if not
  // `accumulate`. `rows` are bf16 matrices of 64 channels.
  __device__ __forceinline__ void Multiply(const char* rows, int low, bool accumulate,
                                           float (&product)[U::kPartTiles][4]) const {
    const uint64_t a = Matrix(rows);
#pragma unroll
    for (int s = 0; s < T::kSteps; ++s) {
      ptx::WgmmaBf16Shared<U::kPartTiles>(product, a + s / 4 * (U::kMatrixBytes / 16) + s % 4 * 2,
                                          Matrix(shared_.basis.rotation[low][s / 4][0]) + s % 4 * 2,
                                          accumulate || s > 0);
    }
  }

 private:
  const float* const rotation_;
  WgmmaShared<T>& shared_;
};

// rotated = q R_K. Leaves the query in shared.basis.rows.
template <class T>
__device__ __forceinline__ void RotateWarpgroupQuery(const PrefillAttentionParams& p,
                                                     const Block<T>& block, WgmmaShared<T>& shared,
                                                     const Warpgroup& warpgroup,
                                                     WgmmaRows<T>& rotated) {
  using U = WarpgroupTraits<T>;
  char* query = shared.basis.rows[warpgroup.index][0];
  LoadWarpgroupQuery<T>(p, shared.warpgroup[warpgroup.index], warpgroup, query);
  if (p.rotation_k == nullptr) {
    warpgroup.Sync();
#pragma unroll
    for (int n = 0; n < T::kDim / 8; ++n) {
#pragma unroll
      for (int a = 0; a < 2; ++a) {
        const int row = warpgroup.Query(a);
        const uint32_t pair = *reinterpret_cast<const uint32_t*>(
            query + n / 8 * U::kMatrixBytes + row * U::kLineBytes + ((n ^ row) % 8) * 16 +
            warpgroup.lane % 4 * 4);
        rotated.Tile(n)[2 * a] = ptx::LowBf16(pair);
        rotated.Tile(n)[2 * a + 1] = ptx::HighBf16(pair);
      }
    }
    return;
  }
  const RotationStream<T, true> stream(
      p.rotation_k + static_cast<int64_t>(block.head) * T::kDim * T::kDim, shared);
#pragma unroll
  for (int part = 0; part < U::kParts; ++part) {
    stream.Load(part);
    ptx::FenceWgmma();
    stream.Multiply(query, 1, false, rotated.part[part]);
    stream.Multiply(query, 0, true, rotated.part[part]);
    ptx::CommitWgmma();
    ptx::WaitWgmma();
    ptx::TakeWgmmaResults(rotated.part[part]);
  }
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
  using U = WarpgroupTraits<T>;
  constexpr int kTiles = T::kDim / 8;
  WgmmaRows<T> rotated;
  RotateWarpgroupQuery<T>(p, block, shared, warpgroup, rotated);
  const float factor = block.scale * kLog2E;
  float most = 0.0f;
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) most = fmaxf(most, fabsf(rotated.Tile(n)[i]) * factor);
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
  char(&operands)[U::kOperands][U::kMatrixBytes] = shared.warpgroup[warpgroup.index].operands;
#pragma unroll
  for (int n = 0; n < kTiles; n += 2) {
    float(&own)[2] = sum[n * T::kGroups / kTiles];
    uint32_t high[4], low[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      // The index of a channel's pair in its word is that of its eight channels.
      const float unit = T::kExact ? PowerOfTwo(CodeShift((n + i / 2) % 8)) : 1.0f;
      const float f = factor * PowerOfTwo(exponent) / unit;
      const float(&x)[4] = rotated.Tile(n + i / 2);
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
      ptx::StoreMatrices(LineAddress<T>(operands[U::kMatrices + n / 8], n % 8, warpgroup), low);
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
                                                       WgmmaState<T>& state) {
  using U = WarpgroupTraits<T>;
  constexpr int kTiles = T::kDim / 8;
  const float mass[2] = {SumOverQuad(state.sum[0]), SumOverQuad(state.sum[1])};
  const float* mean =
      p.mean_v != nullptr ? p.mean_v + block.head * T::kDim + 2 * (warpgroup.lane % 4) : nullptr;
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
    float2 x = make_float2(0.0f, 0.0f);
    if (mean != nullptr) x = __ldg(reinterpret_cast<const float2*>(mean + 8 * n));
    float(&out)[4] = state.out.Tile(n);
#pragma unroll
    for (int i = 0; i < 4; ++i) out[i] = fmaf(out[i], unit, (i % 2 == 0 ? x.x : x.y) * mass[i / 2]);
  }
  if (p.rotation_v == nullptr) return;
  char(&high_rows)[U::kOperands][U::kMatrixBytes] = shared.warpgroup[warpgroup.index].operands;
  char(&low_rows)[U::kMatrices][U::kMatrixBytes] = shared.basis.rows[warpgroup.index];
#pragma unroll
  for (int n = 0; n < kTiles; n += 2) {
    uint32_t high[4], low[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float(&x)[4] = state.out.Tile(n + i / 2);
      ptx::SplitBf16(x[2 * (i % 2)], x[2 * (i % 2) + 1], &high[i], &low[i]);
    }
    ptx::StoreMatrices(LineAddress<T>(high_rows[n / 8], n % 8, warpgroup), high);
    ptx::StoreMatrices(LineAddress<T>(low_rows[n / 8], n % 8, warpgroup), low);
  }
  const RotationStream<T, false> stream(
      p.rotation_v + static_cast<int64_t>(block.head) * T::kDim * T::kDim, shared);
#pragma unroll
  for (int part = 0; part < U::kParts; ++part) {
    float(&out)[U::kPartTiles][4] = state.out.part[part];
    stream.Load(part);
    ptx::FenceWgmma();
    stream.Multiply(high_rows[0], 1, false, out);
    stream.Multiply(low_rows[0], 0, true, out);
    stream.Multiply(high_rows[0], 0, true, out);
    ptx::CommitWgmma();
    ptx::WaitWgmma();
    ptx::TakeWgmmaResults(out);
  }
}

#endif

}  // namespace crumb::kernels::cuda::prefill
