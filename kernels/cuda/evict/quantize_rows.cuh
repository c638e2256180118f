// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_fp16.h>

#include <cfloat>
#include <cstdint>

#include "kernels/cuda/common/ptx.cuh"
#include "kernels/cuda/evict/clip_threshold.cuh"
#include "kernels/quantize.h"

// Quantizes 16 rows that a warp holds as MMA accumulators: y[n][2 a + e] is row r + 8 a, channel 8
// n + 2 c + e of lane 4 r + c. Given the same y, every decision is bit-identical to the scalar
// definition (kernels/quantize.h).
namespace crumb::kernels::cuda {

// --- Ranges ----------------------------------------------------------------------------------

// The range of one group of the lane's own row.
struct RowRange {
  float low;    // least clipped value
  float range;  // difference of the largest and least clipped value, at least 1e-8
};

// Returns the range of group g.
template <class T>
__device__ __forceinline__ RowRange FindRange(const float (&y)[T::kTiles][4], const RowFacts& facts,
                                              int g) {
  float least = facts.least, most = facts.most;
  if constexpr (T::kGroups > 1) {
    float leasts[2], mosts[2];
#pragma unroll
    for (int a = 0; a < 2; ++a) {
      leasts[a] = FLT_MAX, mosts[a] = -FLT_MAX;
#pragma unroll
      for (int n = 0; n < T::kTiles; ++n) {
        if (n / T::kGroupTiles != g) continue;
        leasts[a] = fminf(leasts[a], fminf(y[n][2 * a], y[n][2 * a + 1]));
        mosts[a] = fmaxf(mosts[a], fmaxf(y[n][2 * a], y[n][2 * a + 1]));
      }
    }
    least = ReduceOwnRow(leasts, [](float x, float y) { return fminf(x, y); });
    most = ReduceOwnRow(mosts, [](float x, float y) { return fmaxf(x, y); });
  }
  RowRange found;
  found.low = fminf(fmaxf(least, -facts.threshold), facts.threshold);
  const float high = fmaxf(fminf(most, facts.threshold), -facts.threshold);
  found.range = fminf(fmaxf(__fsub_rn(high, found.low), 1e-8f), FLT_MAX);
  return found;
}

// Returns x / 3 rounded to nearest. REQUIRES: x is a normal number.
__device__ __forceinline__ float Third(float x) {
  constexpr float kThird = 1.0f / 3.0f;
  const float guess = x * kThird;
  return fmaf(fmaf(-3.0f, guess, x), kThird, guess);
}

// Returns x as fp16, rounded to nearest even and clamped to +-65504.
__device__ __forceinline__ uint32_t HalfBits(float x, bool* saturated) {
  if (fabsf(x) >= 65520.0f) {
    *saturated = true;
    return x < 0.0f ? 0xfbffu : 0x7bffu;
  }
  return __half_as_ushort(__float2half_rn(x));
}

// --- Codes -----------------------------------------------------------------------------------

// Returns the least y whose code is at least `code` (1 to 3) by the scalar definition, which
// truncates (y - low) / scale + 1/2 with every operation rounded to nearest. That function is
// monotonic, so a code is decided by comparisons.
//
// Derivation from the last operation backwards: the sum reaches `code` at quotients of 1/2 - 2^-25,
// 1.5 and 2.5; a quotient is reached at scale times the midpoint between it and the float below it
// (exclusive for the first, whose last bit is 1); and the difference likewise. Each product and sum
// is exact in double precision or rounded to the safe side.
__device__ __forceinline__ float LeastWithCode(int code, float low, float scale) {
  const double middle =
      code == 1 ? 0.5 - 3.0 * 0x1p-26 : (code == 2 ? 1.5 - 0x1p-24 : 2.5 - 0x1p-23);
  const double product = static_cast<double>(scale) * middle;
  float difference = __double2float_ru(product);
  if (code == 1 && static_cast<double>(difference) == product) {
    difference = __int_as_float(__float_as_int(difference) + 1);
  }
  const int bits = __float_as_int(difference);
  const double reached =
      0.5 * (static_cast<double>(difference) + static_cast<double>(__int_as_float(bits - 1)));
  float least;
  if (bits % 2 == 0) {
    least = __double2float_ru(__dadd_ru(reached, static_cast<double>(low)));
  } else {
    least = nextafterf(__double2float_rd(__dadd_rd(reached, static_cast<double>(low))), INFINITY);
  }
  return fmaxf(least, nextafterf(low, INFINITY));
}

// Returns 2^60 / scale rounded to a power of two: neighbouring floats at a code's bound differ by
// more than its inverse.
__device__ __forceinline__ float StepFactor(float scale) {
  const int exponent = (__float_as_int(scale) >> 23) - 127;
  return __int_as_float((127 + min(max(60 - exponent, -126), 127)) << 23);
}

// Rounds exactly as the scalar definition does, by comparison with the least y of each code. Rows
// that are not finite get zero: NaN saturates to zero.
template <class T>
__device__ __forceinline__ void RoundExactly(const float (&y)[T::kTiles][4], const RowFacts& facts,
                                             const RowRange (&ranges)[T::kGroups],
                                             uint32_t (&words)[T::kTiles / 4]) {
  const int lane = threadIdx.x % 32;
  // Sums of codes times powers of 4 are whole numbers below 2^16; on top of 2^23 they are the low
  // bits of a float.
  constexpr float kBase = 8388608.0f;
  float sums[T::kTiles / 4][2];
#pragma unroll
  for (int i = 0; i < T::kTiles / 4; ++i) sums[i][0] = sums[i][1] = kBase;
#pragma unroll
  for (int g = 0; g < T::kGroups; ++g) {
    const float my_scale = Third(ranges[g].range);
    const float my_factor = facts.finite ? StepFactor(my_scale) : 0.0f;
    float factor[2], scale[2], low[2], offset[2][3];
    GetBothRows(my_factor, factor);
    GetBothRows(my_scale, scale);
    GetBothRows(ranges[g].low, low);
#pragma unroll
    for (int a = 0; a < 2; ++a) {
      // Each of three lanes finds one bound; a step begins above the float below it.
      const float least = LeastWithCode(min(lane % 4 + 1, 3), low[a], scale[a]);
      const float mine = -nextafterf(least, -INFINITY) * factor[a];
#pragma unroll
      for (int code = 0; code < 3; ++code) {
        offset[a][code] = __shfl_sync(~0u, mine, lane / 4 * 4 + code);
      }
    }
#pragma unroll
    for (int n = g * T::kGroupTiles; n < (g + 1) * T::kGroupTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float unit = static_cast<float>(1 << (2 * (n % 8)));
        float& sum = sums[2 * (n / 8) + i / 2][i % 2];
#pragma unroll
        for (int code = 0; code < 3; ++code) {
          const float reached = __saturatef(fmaf(y[n][i], factor[i / 2], offset[i / 2][code]));
          sum = fmaf(reached, unit, sum);
        }
      }
    }
  }
#pragma unroll
  for (int i = 0; i < T::kTiles / 4; ++i) {
    words[i] = __byte_perm(__float_as_uint(sums[i][0]), __float_as_uint(sums[i][1]), 0x5410);
  }
}

// Rounds by one multiply-add per element. A code differs from the scalar definition's only for
// values within about 2^-20 of the range of a boundary between two codes. REQUIRES: no |y| is above
// kPlaceMax ranges.
// Bound on |y| in ranges up to which RoundNearly keeps its precision.
inline constexpr float kPlaceMax = 8192.0f;

template <class T>
__device__ __forceinline__ void RoundNearly(float (&y)[T::kTiles][4],
                                            const RowRange (&ranges)[T::kGroups],
                                            uint32_t (&words)[T::kTiles / 4]) {
  // The middle of the range lies between codes 1 and 2, so codes are whole numbers rounded down, in
  // the low bits of a float on top of this.
  constexpr float kMagic = 12582914.0f;  // 1.5 * 2^23 + 2
#pragma unroll
  for (int i = 0; i < T::kTiles / 4; ++i) words[i] = 0;
#pragma unroll
  for (int g = 0; g < T::kGroups; ++g) {
    float factor[2];
    GetBothRows(3.0f * ptx::Reciprocal(ranges[g].range), factor);
    const float my_middle = fmaf(0.5f, ranges[g].range, ranges[g].low);
    // The middle of a row that is clipped on both sides is zero.
    if (__any_sync(~0u, my_middle != 0.0f)) {
      float middle[2];
      GetBothRows(my_middle, middle);
#pragma unroll
      for (int n = g * T::kGroupTiles; n < (g + 1) * T::kGroupTiles; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) y[n][i] -= middle[i / 2];
      }
    }
#pragma unroll
    for (int n = g * T::kGroupTiles; n < (g + 1) * T::kGroupTiles; ++n) {
#pragma unroll
      for (int a = 0; a < 2; ++a) {
        uint32_t code[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          code[e] = __float_as_uint(__fmaf_rd(y[n][2 * a + e], factor[a], kMagic));
        }
        const uint32_t pair = __byte_perm(code[0], code[1], 0x5410);
        words[2 * (n / 8) + a] += __vimin_s16x2_relu(pair, 0x00030003u) << (2 * (n % 8));
      }
    }
  }
}

// Packs scale and minimum of the lane's own row: ratio times those of the range. Returns status
// bits.
__device__ __forceinline__ uint32_t PackMeta(const RowRange& range, float ratio, bool finite,
                                             uint32_t* meta) {
  const float scale = ratio * Third(range.range), low = ratio * range.low;
  if (__all_sync(~0u, finite && fmaxf(scale, fabsf(low)) < 65520.0f)) {
    *meta = ptx::PackHalf(scale, low);
    return 0;
  }
  bool saturated = false;
  *meta = HalfBits(scale, &saturated) | HalfBits(low, &saturated) << 16;
  if (!finite) *meta = 0;
  return !finite ? kStatusNonFinite : (saturated ? kStatusSaturated : 0);
}

// Quantizes 16 rows to codes and metadata. words[2 p + a] is the code word of channels 64 p to 64 p
// + 63 of row r + 8 a, in K's order; meta[g] is of the lane's own row. `exact`: y is bit-identical
// to the scalar definition's, so codes must be too. Returns status bits of the lane's own row.
template <class T>
__device__ __forceinline__ uint32_t RoundRows(float (&y)[T::kTiles][4], const RowFacts& facts,
                                              bool exact, uint32_t (&words)[T::kTiles / 4],
                                              uint32_t (&meta)[T::kGroups]) {
  uint32_t status = 0;
  RowRange ranges[T::kGroups];
#pragma unroll
  for (int g = 0; g < T::kGroups; ++g) {
    ranges[g] = FindRange<T>(y, facts, g);
    // The scalar definition negates the largest of 0 - y, so its zero is negative.
    if (ranges[g].low == 0.0f) ranges[g].low = -0.0f;
    // A range that is narrow and far from zero, or too large to have an inverse, is not rounded by
    // one multiplication.
    const float range = ranges[g].range;
    exact |= fabsf(ranges[g].low) > 64.0f * range || range > 1e30f;
    exact |= facts.Peak() > kPlaceMax * range || !facts.finite;
    status |= PackMeta(ranges[g], 1.0f, facts.finite, &meta[g]);
  }
  if (__any_sync(~0u, exact)) {
    RoundExactly<T>(y, facts, ranges, words);
  } else {
    RoundNearly<T>(y, ranges, words);
  }
  return status;
}

}  // namespace crumb::kernels::cuda
