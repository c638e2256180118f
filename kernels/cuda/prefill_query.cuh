// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "kernels/cuda/prefill_traits.cuh"

// Into INT2's bases and back, a warp for its own columns: q' = q R_K before the pages, the output
// times R_V' after them. Both are products with a matrix read from global memory, high + low part.
namespace crumb::kernels::cuda::prefill {

// The warp's query rows as they are, as operands. Columns that do not exist are zero.
template <class T>
__device__ __forceinline__ void LoadPlainQuery(const PrefillAttentionParams& p, Shared<T>& shared,
                                               int warp, int lane) {
#pragma unroll
  for (int n = 0; n < T::kColumnTiles; ++n) {
    const int row = shared.row[warp][8 * n + lane / 4];
    const uint32_t* from = static_cast<const uint32_t*>(p.q) +
                           static_cast<int64_t>(max(row, 0)) * (T::kDim / 2) + lane % 4;
#pragma unroll
    for (int s = 0; s < T::kSteps; s += 2) {
      uint4 x = make_uint4(0, 0, 0, 0);
      if (row >= 0) x = make_uint4(from[8 * s], from[8 * s + 4], from[8 * s + 8], from[8 * s + 12]);
      shared.query[warp][n][s / 2][lane] = x;
    }
  }
  __syncwarp();
}

// A 16 x 16 piece of a matrix in global memory as an operand in two parts of a type. Element
// (row, k) at matrix[row * row_stride + k * k_stride].
template <RowType row_type, bool kRowMajor>
__device__ __forceinline__ void LoadPiece(const float* matrix, int dim, int m, int s, int lane,
                                          uint32_t (&high)[4], uint32_t (&low)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int row = 16 * m + lane / 4 + 8 * (i % 2), k = 16 * s + 2 * (lane % 4) + 8 * (i / 2);
    float x, y;
    if constexpr (kRowMajor) {
      const float2 pair = __ldg(reinterpret_cast<const float2*>(matrix + row * dim + k));
      x = pair.x, y = pair.y;
    } else {
      x = __ldg(matrix + k * dim + row);
      y = __ldg(matrix + (k + 1) * dim + row);
    }
    SplitRows<row_type>(x, y, &high[i], &low[i]);
  }
}

// Rotates the warp's columns into `out` of the state, which is free before the first page.
template <class T>
__device__ __forceinline__ void RotateQuery(const float* rotation, const Shared<T>& shared,
                                            int warp, int lane,
                                            float (&rotated)[T::kColumnTiles][T::kSteps][4]) {
#pragma unroll
  for (int m = 0; m < T::kSteps; ++m) {
    float acc[T::kColumnTiles][4] = {};
#pragma unroll 4
    for (int s = 0; s < T::kSteps; ++s) {
      uint32_t high[4], low[4];
      LoadPiece<T::kRowType, false>(rotation, T::kDim, m, s, lane, high, low);
#pragma unroll
      for (int n = 0; n < T::kColumnTiles; ++n) {
        const uint2 b = reinterpret_cast<const uint2*>(&shared.query[warp][n][s / 2][lane])[s % 2];
        MmaRows<T::kRowType>(acc[n], low, b.x, b.y);
        MmaRows<T::kRowType>(acc[n], high, b.x, b.y);
      }
    }
#pragma unroll
    for (int n = 0; n < T::kColumnTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) rotated[n][m][i] = acc[n][i];
    }
  }
}

// fp16 with everything beyond its range at the end of it; NaN stays.
__device__ __forceinline__ float LimitHalf(float x) {
  return x > 65504.0f ? 65504.0f : x < -65504.0f ? -65504.0f : x;
}

// The exponent that brings queries whose largest element is `most` near 2^8: small ones round like
// large ones. Not below 0: a huge query row (limited at 65504) takes no precision from the others.
__device__ __forceinline__ int QueryExponent(float most) {
  const int exponent = most > 0.0f ? 7 - ilogbf(fminf(most, 3e38f)) : 0;
  return min(max(exponent, 0), 40);
}

// Rounds q' to the operands of the score product: log2 units, times 2^exponent, divided by what
// CodePair multiplies a channel's codes with. Returns the exponent, the same in all lanes. Leaves
// the sums of q' as it was.
template <class T>
__device__ __forceinline__ int PackRotatedQuery(
    const float (&rotated)[T::kColumnTiles][T::kSteps][4], float factor, Shared<T>& shared,
    int warp, int lane) {
  float most = 0.0f;
#pragma unroll
  for (int n = 0; n < T::kColumnTiles; ++n) {
#pragma unroll
    for (int m = 0; m < T::kSteps; ++m) {
#pragma unroll
      for (int i = 0; i < 4; ++i) most = fmaxf(most, fabsf(rotated[n][m][i]) * factor);
    }
  }
  for (int step = 1; step < 32; step *= 2) {
    most = fmaxf(most, __shfl_xor_sync(~0u, most, step));
  }
  const int exponent = QueryExponent(most);
  __syncwarp();
#pragma unroll
  for (int n = 0; n < T::kColumnTiles; ++n) {
#pragma unroll
    for (int y = 0; y < T::kGroups; ++y) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float sum = 0.0f;
#pragma unroll
        for (int m = y * T::kStepsPerGroup; m < (y + 1) * T::kStepsPerGroup; ++m) {
          sum += rotated[n][m][e] + rotated[n][m][2 + e];
        }
        sum = SumOverRows(sum);
        if (lane < 4) shared.query_sum[warp][y][8 * n + 2 * lane + e] = sum * factor;
      }
    }
#pragma unroll
    for (int s = 0; s < T::kSteps; s += 2) {
      uint32_t x[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int step = s + i / 2, half = i % 2;
        const float unit =
            factor * PowerOfTwo(exponent) * PowerOfTwo(-CodeShift(2 * (step % 4) + half));
        x[i] =
            ptx::TransposeMatrix(ptx::PackHalf(LimitHalf(rotated[n][step][2 * half] * unit),
                                               LimitHalf(rotated[n][step][2 * half + 1] * unit)));
      }
      shared.query[warp][n][s / 2][lane] = make_uint4(x[0], x[1], x[2], x[3]);
    }
  }
  __syncwarp();
  return exponent;
}

// The same for queries that need no rotation, in place.
template <class T>
__device__ __forceinline__ int PackPlainQuery(float factor, Shared<T>& shared, int warp, int lane) {
  float most = 0.0f;
  for (int at = 0; at < T::kColumnTiles * T::kSteps / 2; ++at) {
    const uint4 x = shared.query[warp][0][at][lane];
    for (const uint32_t pair : {x.x, x.y, x.z, x.w}) {
      most = fmaxf(
          most, fmaxf(fabsf(LowElement<T::kRowType>(pair)), fabsf(HighElement<T::kRowType>(pair))) *
                    factor);
    }
  }
  for (int step = 1; step < 32; step *= 2) {
    most = fmaxf(most, __shfl_xor_sync(~0u, most, step));
  }
  const int exponent = QueryExponent(most);
#pragma unroll
  for (int n = 0; n < T::kColumnTiles; ++n) {
    float sum = 0.0f;
#pragma unroll
    for (int s = 0; s < T::kSteps; s += 2) {
      const uint4 old = shared.query[warp][n][s / 2][lane];
      uint32_t x[4] = {old.x, old.y, old.z, old.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        sum += LowElement<T::kRowType>(x[i]) + HighElement<T::kRowType>(x[i]);
        const float unit =
            factor * PowerOfTwo(exponent) * PowerOfTwo(-CodeShift(2 * ((s + i / 2) % 4) + i % 2));
        x[i] = ptx::PackHalf(LimitHalf(LowElement<T::kRowType>(x[i]) * unit),
                             LimitHalf(HighElement<T::kRowType>(x[i]) * unit));
      }
      shared.query[warp][n][s / 2][lane] = make_uint4(x[0], x[1], x[2], x[3]);
      if ((s + 2) % T::kStepsPerGroup == 0) {
        sum += __shfl_xor_sync(~0u, sum, 1);
        sum += __shfl_xor_sync(~0u, sum, 2);
        if (lane % 4 == 0) {
          shared.query_sum[warp][s / T::kStepsPerGroup][8 * n + lane / 4] = sum * factor;
        }
        sum = 0.0f;
      }
    }
  }
  __syncwarp();
  return exponent;
}

// What rounding took from the operands, over each group's channels: a row's minimum is multiplied
// by the sum of q' itself, its codes less 1.5 by the operands. Nothing where an operand was
// limited.
template <class T>
__device__ __forceinline__ void SumRounding(int exponent, Shared<T>& shared, int warp, int lane) {
#pragma unroll 1
  for (int n = 0; n < T::kColumnTiles; ++n) {
#pragma unroll
    for (int y = 0; y < T::kGroups; ++y) {
      float sum = 0.0f, most = 0.0f;
#pragma unroll
      for (int s = y * T::kStepsPerGroup; s < (y + 1) * T::kStepsPerGroup; ++s) {
        const uint2 x = reinterpret_cast<const uint2*>(&shared.query[warp][n][s / 2][lane])[s % 2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const uint32_t pair = half == 0 ? x.x : x.y;
          most = fmaxf(most, fmaxf(fabsf(ptx::LowHalf(pair)), fabsf(ptx::HighHalf(pair))));
          sum = fmaf(ptx::LowHalf(pair) + ptx::HighHalf(pair),
                     PowerOfTwo(CodeShift(2 * (s % 4) + half)), sum);
        }
      }
#pragma unroll
      for (int step = 1; step < 4; step *= 2) {
        sum += __shfl_xor_sync(~0u, sum, step);
        most = fmaxf(most, __shfl_xor_sync(~0u, most, step));
      }
      if (lane % 4 == 0) {
        float& all = shared.query_sum[warp][y][8 * n + lane / 4];
        if (most >= 65504.0f) all = sum * PowerOfTwo(-exponent);
        // Products are 2^-24 of codes times operands.
        float* rest = &shared.query_rest[warp][y][4 * n + lane / 8].x + lane / 4 % 2;
        rest[0] = rest[2] = 1.5f * PowerOfTwo(-24) * fmaf(all, PowerOfTwo(exponent), -sum);
      }
    }
  }
  __syncwarp();
}

// q' of the warp's columns as operands, and their sums. Returns 2^24 / 2^exponent: what a score is
// to be multiplied with beside its token's scale.
template <class T>
__device__ __forceinline__ float PrepareQuery(const PrefillAttentionParams& p,
                                              const Block<T>& block, Shared<T>& shared, int warp,
                                              int lane, State<T>& state) {
  const float factor = block.scale * kLog2E;
  int exponent;
  if (p.rotation_k != nullptr) {
    const int64_t matrix = static_cast<int64_t>(block.head) * T::kDim * T::kDim;
    RotateQuery<T>(p.rotation_k + matrix, shared, warp, lane, state.out);
    exponent = PackRotatedQuery<T>(state.out, factor, shared, warp, lane);
  } else {
    exponent = PackPlainQuery<T>(factor, shared, warp, lane);
  }
  SumRounding<T>(exponent, shared, warp, lane);
  return PowerOfTwo(24 - exponent);
}

// out := out R_V', through the query's shared memory, half of the columns at a time.
template <class T>
__device__ __forceinline__ void TurnBack(const float* rotation, Shared<T>& shared, int warp,
                                         int lane, State<T>& state) {
  constexpr int kHalf = T::kColumnTiles / 2;
#pragma unroll
  for (int first = 0; first < T::kColumnTiles; first += kHalf) {
    __syncwarp();
#pragma unroll
    for (int n = 0; n < kHalf; ++n) {
#pragma unroll
      for (int s = 0; s < T::kSteps; s += 2) {
        uint32_t high[4], low[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float(&y)[4] = state.out[first + n][s + i / 2];
          ptx::SplitBf16(y[2 * (i % 2)], y[2 * (i % 2) + 1], &high[i], &low[i]);
          high[i] = ptx::TransposeMatrix(high[i]);
          low[i] = ptx::TransposeMatrix(low[i]);
        }
        shared.query[warp][n][s / 2][lane] = make_uint4(high[0], high[1], high[2], high[3]);
        shared.query[warp][kHalf + n][s / 2][lane] = make_uint4(low[0], low[1], low[2], low[3]);
      }
    }
    __syncwarp();
#pragma unroll
    for (int m = 0; m < T::kSteps; ++m) {
      float acc[kHalf][4] = {};
#pragma unroll 4
      for (int s = 0; s < T::kSteps; ++s) {
        uint32_t high[4], low[4];
        LoadPiece<RowType::kBf16, true>(rotation, T::kDim, m, s, lane, high, low);
#pragma unroll
        for (int n = 0; n < kHalf; ++n) {
          const uint2 b_high =
              reinterpret_cast<const uint2*>(&shared.query[warp][n][s / 2][lane])[s % 2];
          const uint2 b_low =
              reinterpret_cast<const uint2*>(&shared.query[warp][kHalf + n][s / 2][lane])[s % 2];
          ptx::MmaBf16(acc[n], high, b_low.x, b_low.y);
          ptx::MmaBf16(acc[n], low, b_high.x, b_high.y);
          ptx::MmaBf16(acc[n], high, b_high.x, b_high.y);
        }
      }
#pragma unroll
      for (int n = 0; n < kHalf; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) state.out[first + n][m][i] = acc[n][i];
      }
    }
  }
}

}  // namespace crumb::kernels::cuda::prefill
