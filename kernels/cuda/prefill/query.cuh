// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "kernels/cuda/prefill/traits.cuh"

// Rotation of a warp's query rows: q' = q R_K before the pages, and the inverse rotation of the
// output by R_V' after them. Both multiply by a matrix that is read from global memory as high and
// low bf16 parts.
namespace crumb::kernels::cuda::prefill {

// Loads the warp's query rows as operands. Rows that do not exist are zero.
template <class T>
__device__ __forceinline__ void LoadQueryRows(const PrefillAttentionParams& p, Shared<T>& shared,
                                              int warp, int lane) {
#pragma unroll
  for (int n = 0; n < T::kQueryTiles; ++n) {
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

// Loads a 16 x 16 piece of a matrix in global memory as an operand in two bf16 parts. kRowMajor:
// element (row, k) is matrix[row * dim + k], else matrix[k * dim + row].
template <bool kRowMajor>
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
    ptx::SplitBf16(x, y, &high[i], &low[i]);
  }
}

// Rotates the warp's query rows into `rotated`, for which State::out is free before the first page.
template <class T>
__device__ __forceinline__ void RotateQuery(const float* rotation, const Shared<T>& shared,
                                            int warp, int lane,
                                            float (&rotated)[T::kQueryTiles][T::kSteps][4]) {
#pragma unroll
  for (int m = 0; m < T::kSteps; ++m) {
    float acc[T::kQueryTiles][4] = {};
#pragma unroll 4
    for (int s = 0; s < T::kSteps; ++s) {
      uint32_t high[4], low[4];
      LoadPiece<false>(rotation, T::kDim, m, s, lane, high, low);
#pragma unroll
      for (int n = 0; n < T::kQueryTiles; ++n) {
        const uint2 b = reinterpret_cast<const uint2*>(&shared.query[warp][n][s / 2][lane])[s % 2];
        ptx::MmaBf16(acc[n], low, b.x, b.y);
        ptx::MmaBf16(acc[n], high, b.x, b.y);
      }
    }
#pragma unroll
    for (int n = 0; n < T::kQueryTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) rotated[n][m][i] = acc[n][i];
    }
  }
}

// Limits a float to the range of fp16; NaN stays.
__device__ __forceinline__ float LimitHalf(float x) {
  return x > 65504.0f ? 65504.0f : x < -65504.0f ? -65504.0f : x;
}

// Returns the exponent that scales queries whose largest element is `most` to about 2^8, so that
// small and large queries round alike. It is not negative: a huge query row (limited at 65504)
// takes no precision from the others.
__device__ __forceinline__ int QueryExponent(float most) {
  const int exponent = most > 0.0f ? 7 - ilogbf(fminf(most, 3e38f)) : 0;
  return min(max(exponent, 0), 40);
}

// Integer sums of byte MMAs become floats without conversion: they are the low bits of a float
// between 2^23 and 2^24, counted from the middle of that range, and must not be further from it
// than kDotMax.
inline constexpr float kDotMiddle = 0x1.8p23f;
inline constexpr float kDotMax = 0x1p22f;

// The range of a row of q' and its sums, from which its rounding to 16 bits follows.
template <class T>
struct QueryRowRange {
  float most = 0.0f;                // largest absolute value
  float sum[T::kGroups] = {};       // sum over each group's channels
  float absolute[T::kGroups] = {};  // sum of absolute values over each group's channels

  __device__ __forceinline__ void Add(float x, int group) {
    most = fmaxf(most, fabsf(x));
    sum[group] += x;
    absolute[group] += fabsf(x);
  }
  // Reduces over the lanes that share the row: lanes that differ in the bits from `first` up to
  // `end`.
  __device__ __forceinline__ void Join(int first, int end) {
    for (int step = first; step < end; step *= 2) {
      most = fmaxf(most, __shfl_xor_sync(~0u, most, step));
#pragma unroll
      for (int y = 0; y < T::kGroups; ++y) {
        sum[y] += __shfl_xor_sync(~0u, sum[y], step);
        absolute[y] += __shfl_xor_sync(~0u, absolute[y], step);
      }
    }
  }
  // Returns the number of rounding steps per unit of q'. Both bytes are signed, so 127 * 256 + 127
  // is the largest number of steps; codes are at most 1.5 from their middle.
  __device__ __forceinline__ float Steps() const {
    float total = 0.0f;
#pragma unroll
    for (const float x : absolute) total = fmaxf(total, x);
    if (!(most > 0x1p-100f)) return 1.0f;
    return fminf(32600.0f / most, 0.98f * kDotMax / 1.5f / total);
  }
  __device__ __forceinline__ bool Finite() const {
    bool finite = true;
#pragma unroll
    for (const float x : absolute) finite &= x < INFINITY;
    return finite;
  }
};

// Stores the terms of a query row's scores other than its operands. One lane calls it.
template <class T>
__device__ __forceinline__ void StoreTerms(const QueryRowRange<T>& range,
                                           const int (&rounded)[T::kGroups], float factor,
                                           Shared<T>& shared, int warp, int query_row) {
#pragma unroll
  for (int y = 0; y < T::kGroups; ++y) {
    float* terms = &shared.query_terms[warp][y][query_row / 2].x + query_row % 2;
    terms[0] = __int_as_float(__float_as_int(kDotMiddle) - 3 * rounded[y] / 2);
    terms[2] = range.sum[y] * factor;
  }
  // The unit has two bits less, so that its multiplication by the middle is exact. After rounding a
  // row that is not finite would look finite, so its unit makes all logits NaN.
  float unit = __uint_as_float(__float_as_uint(factor / range.Steps()) & ~3u);
  if (!range.Finite()) unit = __int_as_float(0x7fffffff);
  float* units = &shared.query_unit[warp][query_row / 2].x + query_row % 2;
  units[0] = unit;
  units[2] = -kDotMiddle * unit;
}

// Returns an element in rounding steps.
__device__ __forceinline__ int Round(float x, float steps) { return __float2int_rn(x * steps); }

// Splits the steps of 64 channels into operands of high and of low bytes. Each input word holds two
// channels of a query row, eight channels by eight; bytes are in the order of CodeBytes.
template <class T>
__device__ __forceinline__ void SplitBytes(const uint32_t (&steps)[8], uint4* high, uint4* low) {
  uint32_t h[4], l[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    // Half 0 has words 0 and 1, half 1 words 2 and 3.
    const int eight = T::kStepsPerGroup > 2 ? i / 2 + 2 * (i % 2) : 2 * i;
    const uint32_t one = steps[eight], other = steps[eight + (T::kStepsPerGroup > 2 ? 4 : 1)];
    // Low bytes are signed.
    h[i] = __byte_perm(__vadd2(one, 0x00800080u), __vadd2(other, 0x00800080u), 0x7351);
    l[i] = __byte_perm(one, other, 0x6240);
  }
  *high = make_uint4(h[0], h[1], h[2], h[3]);
  *low = make_uint4(l[0], l[1], l[2], l[3]);
}

__device__ __forceinline__ uint32_t PackSteps(int low, int high) {
  return __byte_perm(static_cast<uint32_t>(low), static_cast<uint32_t>(high), 0x5410);
}

// Rounds q' to 16 bits, each query row with its own step, and stores it as score operands in two
// bytes.
template <class T>
__device__ __forceinline__ void PackRotatedQuery(
    const float (&rotated)[T::kQueryTiles][T::kSteps][4], float factor, Shared<T>& shared, int warp,
    int lane) {
  __syncwarp();
#pragma unroll
  for (int n = 0; n < T::kQueryTiles; ++n) {
    float steps[2];
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      QueryRowRange<T> range;
      int rounded[T::kGroups] = {};
#pragma unroll
      for (int m = 0; m < T::kSteps; ++m) {
#pragma unroll
        for (int a = 0; a < 2; ++a) {
          range.Add(rotated[n][m][2 * a + e], m / T::kStepsPerGroup);
        }
      }
      range.Join(4, 32);
      steps[e] = range.Steps();
#pragma unroll
      for (int m = 0; m < T::kSteps; ++m) {
#pragma unroll
        for (int a = 0; a < 2; ++a) {
          rounded[m / T::kStepsPerGroup] += Round(rotated[n][m][2 * a + e], steps[e]);
        }
      }
#pragma unroll
      for (int y = 0; y < T::kGroups; ++y) rounded[y] = SumOverRows(rounded[y]);
      if (lane < 4) StoreTerms<T>(range, rounded, factor, shared, warp, 8 * n + 2 * lane + e);
    }
#pragma unroll
    for (int part = 0; part < T::kSteps / 4; ++part) {
      uint32_t x[8];
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const float(&from)[4] = rotated[n][4 * part + j / 2];
        const int a = j % 2;
        x[j] = ptx::TransposeMatrix(
            PackSteps(Round(from[2 * a], steps[0]), Round(from[2 * a + 1], steps[1])));
      }
      uint4(*to)[32] = &shared.query[warp][n][2 * part];
      SplitBytes<T>(x, &to[0][lane], &to[1][lane]);
    }
  }
  __syncwarp();
}

// PackRotatedQuery for queries without rotation, in place.
template <class T>
__device__ __forceinline__ void PackUnrotatedQuery(float factor, Shared<T>& shared, int warp,
                                                   int lane) {
#pragma unroll 1
  for (int n = 0; n < T::kQueryTiles; ++n) {
    QueryRowRange<T> range;
    int rounded[T::kGroups] = {};
    uint32_t x[2 * T::kSteps];
#pragma unroll
    for (int s = 0; s < T::kSteps; s += 2) {
      const uint4 pairs = shared.query[warp][n][s / 2][lane];
      x[2 * s] = pairs.x, x[2 * s + 1] = pairs.y, x[2 * s + 2] = pairs.z, x[2 * s + 3] = pairs.w;
    }
#pragma unroll
    for (int j = 0; j < 2 * T::kSteps; ++j) {
      range.Add(ptx::LowBf16(x[j]), j / 2 / T::kStepsPerGroup);
      range.Add(ptx::HighBf16(x[j]), j / 2 / T::kStepsPerGroup);
    }
    range.Join(1, 4);
    const float steps = range.Steps();
#pragma unroll
    for (int j = 0; j < 2 * T::kSteps; ++j) {
      const int low = Round(ptx::LowBf16(x[j]), steps);
      const int high = Round(ptx::HighBf16(x[j]), steps);
      rounded[j / 2 / T::kStepsPerGroup] += low + high;
      x[j] = PackSteps(low, high);
    }
#pragma unroll
    for (int y = 0; y < T::kGroups; ++y) {
      rounded[y] += __shfl_xor_sync(~0u, rounded[y], 1);
      rounded[y] += __shfl_xor_sync(~0u, rounded[y], 2);
    }
    if (lane % 4 == 0) StoreTerms<T>(range, rounded, factor, shared, warp, 8 * n + lane / 4);
#pragma unroll
    for (int part = 0; part < T::kSteps / 4; ++part) {
      uint4(*to)[32] = &shared.query[warp][n][2 * part];
      const uint32_t(&eight)[8] = *reinterpret_cast<const uint32_t(*)[8]>(&x[8 * part]);
      SplitBytes<T>(eight, &to[0][lane], &to[1][lane]);
    }
  }
  __syncwarp();
}

// Prepares q' of the warp's query rows as operands, with the terms of their scores.
template <class T>
__device__ __forceinline__ void PrepareQuery(const PrefillAttentionParams& p, const Block<T>& block,
                                             Shared<T>& shared, int warp, int lane,
                                             State<T>& state) {
  const float factor = block.scale * kLog2E;
  if (p.rotation_k != nullptr) {
    const int64_t matrix = static_cast<int64_t>(block.head) * T::kDim * T::kDim;
    RotateQuery<T>(p.rotation_k + matrix, shared, warp, lane, state.out);
    PackRotatedQuery<T>(state.out, factor, shared, warp, lane);
  } else {
    PackUnrotatedQuery<T>(factor, shared, warp, lane);
  }
}

// Replaces out by out R_V', through the shared memory of the query, half of the query rows at a
// time.
template <class T>
__device__ __forceinline__ void InverseRotate(const float* rotation, Shared<T>& shared, int warp,
                                              int lane, State<T>& state) {
  constexpr int kHalf = T::kQueryTiles / 2;
#pragma unroll
  for (int first = 0; first < T::kQueryTiles; first += kHalf) {
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
        LoadPiece<true>(rotation, T::kDim, m, s, lane, high, low);
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
