// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_fp16.h>

#include <cfloat>
#include <cstdint>

#include "kernels/cuda/clip_guess.h"
#include "kernels/cuda/evict_ptx.cuh"
#include "kernels/cuda/ptx.cuh"
#include "kernels/quantize.h"

// Quantizes 16 rows that a warp holds as matrix accumulators: y[n][2 a + e] is row r + 8 a, channel
// 8 n + 2 c + e of lane 4 r + c. Every decision is the one that the scalar definition makes, bit
// for bit, given the same y.
namespace crumb::kernels::cuda {

template <int dim, int group_size>
struct RowTraits {
  static constexpr int kDim = dim;
  static constexpr int kTiles = dim / 8;  // of 8 channels
  static constexpr int kGroups = dim / group_size;
  static constexpr int kGroupTiles = group_size / 8;
};

// Over the 4 lanes that share rows.
__device__ __forceinline__ float MaxOverChannels(float x) {
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
  return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}
__device__ __forceinline__ float MinOverChannels(float x) {
  x = fminf(x, __shfl_xor_sync(~0u, x, 1));
  return fminf(x, __shfl_xor_sync(~0u, x, 2));
}
__device__ __forceinline__ int SumOverChannels(int x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}
__device__ __forceinline__ float SumOverChannels(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}

// --- The clip threshold ----------------------------------------------------------------------

// What the threshold's search and the range know of rows r and r + 8.
struct RowFacts {
  bool finite[2];
  float sigma[2];  // root of the mean square, near enough for guesses
  float least[2], most[2];
  float threshold[2];  // largest |y| inside the range

  __device__ __forceinline__ float Peak(int a) const { return fmaxf(-least[a], most[a]); }
};

// Rows' extremes and whether their values are finite; rows that are not become zeros.
template <class T>
__device__ __forceinline__ void LookAtRows(float (&y)[T::kTiles][4], RowFacts* facts) {
  // Among floats as signed numbers the most is the most; as unsigned ones it is the least, if one
  // is negative.
  int most_bits[2];
  uint32_t least_bits[2];
#pragma unroll
  for (int n = 0; n < T::kTiles; ++n) {
#pragma unroll
    for (int a = 0; a < 2; ++a) {
      const float one = y[n][2 * a], other = y[n][2 * a + 1];
      if (n == 0) {
        most_bits[a] = __float_as_int(one);
        least_bits[a] = __float_as_uint(one);
      }
      most_bits[a] = __vimax3_s32(most_bits[a], __float_as_int(one), __float_as_int(other));
      least_bits[a] = __vimax3_u32(least_bits[a], __float_as_uint(one), __float_as_uint(other));
    }
  }
  bool plain = true;
#pragma unroll
  for (int a = 0; a < 2; ++a) {
    int most = most_bits[a];
    uint32_t least = least_bits[a];
#pragma unroll
    for (int lanes = 1; lanes <= 2; lanes *= 2) {
      most = max(most, __shfl_xor_sync(~0u, most, lanes));
      least = max(least, __shfl_xor_sync(~0u, least, lanes));
    }
    facts->finite[a] = true;
    facts->most[a] = __int_as_float(most);
    facts->least[a] = __uint_as_float(least);
    facts->threshold[a] = FLT_MAX;
    plain &= most >= 0 && most < 0x7f800000 && least - 0x80000000u < 0x7f800000u;
  }
  if (__all_sync(~0u, plain)) return;
#pragma unroll
  for (int a = 0; a < 2; ++a) {
    float least = y[0][2 * a], most = least, poison = 0.0f;
#pragma unroll
    for (int n = 0; n < T::kTiles; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        least = fminf(least, y[n][2 * a + e]);
        most = fmaxf(most, y[n][2 * a + e]);
        poison = fmaf(y[n][2 * a + e], 0.0f, poison);  // NaN as soon as one is not finite
      }
    }
    least = MinOverChannels(least);
    most = MaxOverChannels(most);
    facts->finite[a] = SumOverChannels(poison) == 0.0f;
    facts->least[a] = facts->finite[a] ? least : 0.0f;
    facts->most[a] = facts->finite[a] ? most : 0.0f;
#pragma unroll
    for (int n = 0; n < T::kTiles; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) y[n][2 * a + e] = facts->finite[a] ? y[n][2 * a + e] : 0.0f;
    }
  }
}

// 1 if magnitude >= bound, else 0.
__device__ __forceinline__ float AtLeast(float magnitude, float bound) {
  float one;
  asm("set.ge.f32.f32 %0, %1, %2;" : "=f"(one) : "f"(magnitude), "f"(bound));
  return one;
}

// A bound with `rank` values at or above it, or one less.
struct Neighbour {
  float bound;
  bool above;  // the threshold is the most below the bound, else the least from it on
};

// Bounds for rows r (even c) and r + 8 (odd c), whatever the rows. Counts values at and above a
// bound that closes in, interpolated at first, in the bits of floats when that does not end it.
template <class T>
__device__ __forceinline__ Neighbour SearchInFloats(const float (&y)[T::kTiles][4],
                                                    const ClipGuess& clip, const RowFacts& facts) {
  const bool second = threadIdx.x % 2 != 0;
  const float rank = static_cast<float>(clip.rank);
  const float peak = second ? facts.Peak(1) : facts.Peak(0);
  float low = 0.0f, low_count = T::kDim, high_count = 0.0f;
  float high = __int_as_float(__float_as_int(peak) + 1);
  float bound = 0.5f * peak;
  bool done = false;
#pragma unroll 1
  for (int round = 0; round < 48; ++round) {
    if (!done && (round >= 8 || !(bound > low && bound < high))) {
      const int begin = __float_as_int(low);
      bound = __int_as_float(begin + (__float_as_int(high) - begin) / 2);
    }
    const float other = __shfl_xor_sync(~0u, bound, 1);
    const float first_bound = second ? other : bound, second_bound = second ? bound : other;
    float first_count = 0.0f, second_count = 0.0f;
#pragma unroll
    for (int n = 0; n < T::kTiles; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        first_count += AtLeast(fabsf(y[n][e]), first_bound);
        second_count += AtLeast(fabsf(y[n][2 + e]), second_bound);
      }
    }
    float count = second ? second_count : first_count;
    count += __shfl_xor_sync(~0u, second ? first_count : second_count, 1);
    count += __shfl_xor_sync(~0u, count, 2);
    if (!done) {
      const bool below = count >= rank;
      low = below ? bound : low;
      low_count = below ? count : low_count;
      high = below ? high : bound;
      high_count = below ? high_count : count;
      // With no float between them the threshold is `low` itself.
      done = low_count == rank || high_count == rank - 1.0f ||
             __float_as_int(high) - __float_as_int(low) <= 1;
      const float part = __fdividef(low_count - rank + 0.5f, low_count - high_count);
      bound = fmaf(part, high - low, low);
    }
    if (__all_sync(~0u, done)) break;
  }
  const bool above = low_count != rank && high_count == rank - 1.0f;
  return {above ? high : low, above};
}

// Rows' magnitudes as halves, rounded towards zero: in the order in which products take them.
template <class T>
using RowHalves = uint32_t[T::kTiles][2];

// facts->sigma, of halves: the diagonals of their products with themselves.
template <class T>
__device__ __forceinline__ void FindSigma(const RowHalves<T>& halves, RowFacts* facts) {
  const int lane = threadIdx.x % 32, row = lane / 4;
  float squares[2][4] = {};
#pragma unroll
  for (int n = 0; n < T::kTiles; n += 2) {
    const uint32_t first = halves[n][0], second = halves[n][1];
    const uint32_t third = halves[n + 1][0], fourth = halves[n + 1][1];
    ptx::MmaF16(squares[0], first, second, third, fourth, first, third);
    ptx::MmaF16(squares[1], first, second, third, fourth, second, fourth);
  }
#pragma unroll
  for (int a = 0; a < 2; ++a) {
    const float mine = row % 2 == 0 ? squares[a][2 * a] : squares[a][2 * a + 1];
    const float square = __shfl_sync(~0u, mine, 4 * row + row / 2);
    facts->sigma[a] = sqrtf(square * (1.0f / T::kDim));
  }
}

// How many magnitudes of the row r (r + 8) are at least the bound in both halves of bounds[0] (1).
template <class T>
__device__ __forceinline__ void CountAtLeast(const RowHalves<T>& halves, uint32_t first_bound,
                                             uint32_t second_bound, float (&counts)[2]) {
  constexpr uint32_t kOnes = 0x3c003c00u;
  float sums[2][4] = {};
#pragma unroll
  for (int n = 0; n < T::kTiles; n += 2) {
    ptx::MmaF16(sums[n / 2 % 2], ptx::HalvesAtLeast(halves[n][0], first_bound),
                ptx::HalvesAtLeast(halves[n][1], second_bound),
                ptx::HalvesAtLeast(halves[n + 1][0], first_bound),
                ptx::HalvesAtLeast(halves[n + 1][1], second_bound), kOnes, kOnes);
  }
  counts[0] = sums[0][0] + sums[1][0];
  counts[1] = sums[0][2] + sums[1][2];
}

// Bounds for rows r (even c) and r + 8 (odd c). False if one of the warp's rows has too many values
// that are the same as halves.
template <class T>
__device__ __forceinline__ bool SearchInHalves(const RowHalves<T>& halves, const ClipGuess& clip,
                                               const RowFacts& facts, Neighbour* found) {
  constexpr int kRoundsMax = 10;
  const bool second = threadIdx.x % 2 != 0;
  const float rank = static_cast<float>(clip.rank);
  const float sigma = second ? facts.sigma[1] : facts.sigma[0];
  const float step = sigma * clip.step;
  float high = __int_as_float(__float_as_int(second ? facts.Peak(1) : facts.Peak(0)) + 1);
  float low = 0.0f, low_count = T::kDim, high_count = 0.0f, bound = sigma * clip.first;
  bool done = false;
#pragma unroll 1
  for (int round = 0; round < kRoundsMax; ++round) {
    const uint32_t packed = ptx::PackHalfTowardsZero(bound, bound);
    bound = ptx::LowHalf(packed);
    const uint32_t other = __shfl_xor_sync(~0u, packed, 1);
    float counts[2];
    CountAtLeast<T>(halves, second ? other : packed, second ? packed : other, counts);
    const float count = second ? counts[1] : counts[0];
    const float newton = fmaf(count - rank + 0.5f, step, bound);
    if (count >= rank) {
      low = bound;
      low_count = count;
    } else {
      high = bound;
      high_count = count;
    }
    done = low_count == rank || high_count == rank - 1.0f;
    const float part = (low_count - rank + 0.5f) * ptx::Reciprocal(low_count - high_count);
    bound = low > 0.0f ? fmaf(part, high - low, low) : newton;
    if (done) bound = low_count == rank ? low : high;
    if (__all_sync(~0u, done)) break;
  }
  found->bound = bound;
  found->above = low_count != rank;
  return __all_sync(~0u, done);
}

// The magnitude next to each row's bound.
template <class T>
__device__ __forceinline__ void TakeNeighbours(const float (&y)[T::kTiles][4],
                                               const Neighbour& found, RowFacts* facts) {
  const bool second = threadIdx.x % 2 != 0;
  // Magnitudes' distances upwards from the bound, downwards from the one below it for bits turned
  // over: those on the other side wrap around and are large.
  const uint32_t my_flip = found.above ? ~0u : 0u;
  const uint32_t bits = __float_as_uint(found.bound);
  const uint32_t my_shift = found.above ? bits : 0u - bits;
  const uint32_t other_flip = __shfl_xor_sync(~0u, my_flip, 1);
  const uint32_t other_shift = __shfl_xor_sync(~0u, my_shift, 1);
#pragma unroll
  for (int a = 0; a < 2; ++a) {
    const bool mine = second == (a == 1);
    const uint32_t flip = mine ? my_flip : other_flip, shift = mine ? my_shift : other_shift;
    uint32_t least = ~0u;
#pragma unroll
    for (int n = 0; n < T::kTiles; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const uint32_t turned = (__float_as_uint(y[n][2 * a + e]) & 0x7fffffffu) ^ flip;
        least = __viaddmin_u32(turned, shift, least);
      }
    }
    least = min(least, __shfl_xor_sync(~0u, least, 1));
    least = min(least, __shfl_xor_sync(~0u, least, 2));
    facts->threshold[a] = __uint_as_float((least - shift) ^ flip);
  }
}

// Fills in sigma and threshold.
template <class T>
__device__ __forceinline__ void FindThresholds(const float (&y)[T::kTiles][4],
                                               const ClipGuess& clip, RowFacts* facts) {
  // Halves hold neither larger values nor, in enough bits, smaller ones.
  constexpr float kMost = 65504.0f, kLeast = 0x1p-12f;
  bool plain = true;
#pragma unroll
  for (int a = 0; a < 2; ++a) {
    plain &= facts->Peak(a) < kMost && facts->Peak(a) > kLeast;
  }
  Neighbour found;
  bool ended = __all_sync(~0u, plain);
  if (ended) {
    RowHalves<T> halves;
#pragma unroll
    for (int n = 0; n < T::kTiles; ++n) {
#pragma unroll
      for (int a = 0; a < 2; ++a) {
        halves[n][a] = ptx::PackHalfTowardsZero(y[n][2 * a], y[n][2 * a + 1]) & 0x7fff7fffu;
      }
    }
    FindSigma<T>(halves, facts);
    ended = SearchInHalves<T>(halves, clip, *facts, &found);
  }
  if (!ended) found = SearchInFloats<T>(y, clip, *facts);
  TakeNeighbours<T>(y, found, facts);
}

// --- Ranges ----------------------------------------------------------------------------------

struct RowRange {
  float low[2];    // least clipped value of rows r and r + 8
  float range[2];  // most - least, at least 1e-8
};

// Of group g.
template <class T>
__device__ __forceinline__ RowRange FindRange(const float (&y)[T::kTiles][4], const RowFacts& facts,
                                              int g) {
  RowRange found;
#pragma unroll
  for (int a = 0; a < 2; ++a) {
    float least = facts.least[a], most = facts.most[a];
    if constexpr (T::kGroups > 1) {
      least = facts.threshold[a], most = -facts.threshold[a];
#pragma unroll
      for (int n = 0; n < T::kTiles; ++n) {
        if (n / T::kGroupTiles != g) continue;
        least = fminf(least, fminf(y[n][2 * a], y[n][2 * a + 1]));
        most = fmaxf(most, fmaxf(y[n][2 * a], y[n][2 * a + 1]));
      }
      least = MinOverChannels(least);
      most = MaxOverChannels(most);
    }
    found.low[a] = fminf(fmaxf(least, -facts.threshold[a]), facts.threshold[a]);
    const float high = fmaxf(fminf(most, facts.threshold[a]), -facts.threshold[a]);
    found.range[a] = fminf(fmaxf(__fsub_rn(high, found.low[a]), 1e-8f), FLT_MAX);
  }
  return found;
}

// x / 3, rounded to the nearest; x normal.
__device__ __forceinline__ float Third(float x) {
  constexpr float kThird = 1.0f / 3.0f;
  const float guess = x * kThird;
  return fmaf(fmaf(-3.0f, guess, x), kThird, guess);
}

// fp16, nearest even, limited to +-65504.
__device__ __forceinline__ uint32_t HalfBits(float x, bool* saturated) {
  if (fabsf(x) >= 65520.0f) {
    *saturated = true;
    return x < 0.0f ? 0xfbffu : 0x7bffu;
  }
  return __half_as_ushort(__float2half_rn(x));
}

// --- Codes by rounding to the nearest --------------------------------------------------------

// The least y whose code is at least `code` (1..3) by the scalar definition, which truncates
// (y - low) / scale + 1/2 with every operation rounded to the nearest. That never falls as y grows,
// so a code needs comparisons only. From the last operation back: the sum reaches `code` from
// quotients of 1/2 - 2^-25, 1.5 and 2.5 on; the quotient reaches those from the middle between them
// and the float below (exclusive for the first, whose last bit is 1), times scale, on; and so does
// the difference. Each product and sum is exact in double precision or rounded to the safe side.
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

// 2^60 / scale, a power of two: floats next to a code's bound differ by more than its inverse.
__device__ __forceinline__ float StepFactor(float scale) {
  const int exponent = (__float_as_int(scale) >> 23) - 127;
  return __int_as_float((127 + min(max(60 - exponent, -126), 127)) << 23);
}

// The words of codes for ranges[g]. Exactly the scalar definition's.
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
    float factor[2], offset[2][3];
#pragma unroll
    for (int a = 0; a < 2; ++a) {
      const float scale = Third(ranges[g].range[a]);
      factor[a] = facts.finite[a] ? StepFactor(scale) : 0.0f;
      // Each of three lanes finds one bound; a step begins behind the float below it.
      const float least = LeastWithCode(min(lane % 4 + 1, 3), ranges[g].low[a], scale);
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

// The same but for values within some 2^-20 of the range of a bound between two codes. No |y| is
// above kPlaceMax ranges.
inline constexpr float kPlaceMax = 8192.0f;

template <class T>
__device__ __forceinline__ void RoundNearly(float (&y)[T::kTiles][4],
                                            const RowRange (&ranges)[T::kGroups],
                                            uint32_t (&words)[T::kTiles / 4]) {
  // The middle of the range lies between codes 1 and 2, so codes are whole numbers rounded down:
  // the low bits of a float with this on top.
  constexpr float kMagic = 12582914.0f;  // 1.5 * 2^23 + 2
#pragma unroll
  for (int i = 0; i < T::kTiles / 4; ++i) words[i] = 0;
#pragma unroll
  for (int g = 0; g < T::kGroups; ++g) {
    float factor[2], middle[2];
#pragma unroll
    for (int a = 0; a < 2; ++a) {
      factor[a] = __fdividef(3.0f, ranges[g].range[a]);
      middle[a] = fmaf(0.5f, ranges[g].range[a], ranges[g].low[a]);
    }
    // Clipped on both sides it is zero.
    if (__any_sync(~0u, middle[0] != 0.0f || middle[1] != 0.0f)) {
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

// Codes and metadata of 16 rows. words[2 p + a]: the word of channels 64 p .. 64 p + 63, row r + 8
// a, in K's order. meta[y][a]: valid in every lane of the row. exact: y is the scalar definition's,
// so the codes can be. Returns status bits of the lane's rows.
template <class T>
__device__ __forceinline__ uint32_t RoundRows(float (&y)[T::kTiles][4], const RowFacts& facts,
                                              bool exact, uint32_t (&words)[T::kTiles / 4],
                                              uint32_t (&meta)[T::kGroups][2]) {
  uint32_t status = 0;
  RowRange ranges[T::kGroups];
#pragma unroll
  for (int g = 0; g < T::kGroups; ++g) {
    ranges[g] = FindRange<T>(y, facts, g);
#pragma unroll
    for (int a = 0; a < 2; ++a) {
      // The scalar definition negates the largest of 0 - y: its zero is negative.
      if (ranges[g].low[a] == 0.0f) ranges[g].low[a] = -0.0f;
      // Far from zero and narrow, or beyond what an inverse can be: not by one multiplication.
      const float range = ranges[g].range[a];
      exact |= fabsf(ranges[g].low[a]) > 64.0f * range || range > 1e30f;
      exact |= facts.Peak(a) > kPlaceMax * range;
      bool saturated = false;
      meta[g][a] = HalfBits(Third(range), &saturated) | HalfBits(ranges[g].low[a], &saturated)
                                                            << 16;
      if (!facts.finite[a]) {
        meta[g][a] = 0;
        status |= kStatusNonFinite;
      } else if (saturated) {
        status |= kStatusSaturated;
      }
    }
  }
  if (__any_sync(~0u, exact)) {
    RoundExactly<T>(y, facts, ranges, words);
  } else {
    RoundNearly<T>(y, ranges, words);
  }
  return status;
}

}  // namespace crumb::kernels::cuda
