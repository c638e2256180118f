// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_fp16.h>

#include <cfloat>
#include <cstdint>

#include "kernels/cuda/clip_guess.h"
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
  float sigma[2];      // root of the mean square, near enough for guesses
  float threshold[2];  // largest |y| inside the range
  // The threshold itself is the least (most) value of the clipped row, whatever the others are.
  bool reaches_low[2], reaches_high[2];
};

// Rows' deviation and whether their values are finite; rows that are not become zeros. Squares that
// overflow say nothing, so such a warp looks at every value.
template <class T>
__device__ __forceinline__ void LookAtRows(float (&y)[T::kTiles][4], RowFacts* facts) {
  float squares[2] = {0.0f, 0.0f};
#pragma unroll
  for (int n = 0; n < T::kTiles; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) squares[i / 2] = fmaf(y[n][i], y[n][i], squares[i / 2]);
  }
  bool plain = true;
#pragma unroll
  for (int a = 0; a < 2; ++a) {
    squares[a] = SumOverChannels(squares[a]);
    facts->finite[a] = true;
    facts->sigma[a] = sqrtf(squares[a] / T::kDim);
    facts->threshold[a] = FLT_MAX;
    facts->reaches_low[a] = facts->reaches_high[a] = false;
    plain &= squares[a] < 1e30f;
  }
  if (__all_sync(~0u, plain)) return;
#pragma unroll
  for (int a = 0; a < 2; ++a) {
    float peak = 0.0f, poison = 0.0f;
#pragma unroll
    for (int n = 0; n < T::kTiles; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        peak = fmaxf(peak, fabsf(y[n][2 * a + e]));
        poison = fmaf(y[n][2 * a + e], 0.0f, poison);  // NaN as soon as one is not finite
      }
    }
    peak = MaxOverChannels(peak);
    facts->finite[a] = SumOverChannels(poison) == 0.0f;
    if (!(squares[a] < 1e30f)) facts->sigma[a] = facts->finite[a] ? 0.5f * peak : 0.0f;
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

// The rank-th largest |v| of rows r and r + 8, exactly: at(a, i) of each lane of 4, i < kCount, of
// which low_count[a] are at least low[a], and none more than peak[a]. Counts values at and above a
// bound that closes in, interpolated at first, in the bits of floats when that does not end it.
// Lanes with odd c follow row r + 8, the others row r.
template <int kCount, typename At>
__device__ __forceinline__ void LargestMagnitudes(const At& at, const ClipGuess& clip,
                                                  const float (&sigma)[2], const float (&lows)[2],
                                                  const int (&low_counts)[2],
                                                  const float (&peak)[2], float (&found)[2]) {
  const bool second = threadIdx.x % 2 != 0;
  const float rank = static_cast<float>(clip.rank);
  float low = second ? lows[1] : lows[0];
  float low_count = static_cast<float>(second ? low_counts[1] : low_counts[0]), high_count = 0.0f;
  float high = __int_as_float(__float_as_int(second ? peak[1] : peak[0]) + 1);
  float bound = (second ? sigma[1] : sigma[0]) * clip.first;
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
    for (int i = 0; i < kCount; ++i) {
      first_count += AtLeast(fabsf(at(0, i)), first_bound);
      second_count += AtLeast(fabsf(at(1, i)), second_bound);
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
      done = low_count == rank || high_count == rank - 1.0f ||
             __float_as_int(high) - __float_as_int(low) <= 1;
      const float part = __fdividef(low_count - rank + 0.5f, low_count - high_count);
      bound = fmaf(part, high - low, low);
    }
    if (__all_sync(~0u, done)) break;
  }
  // The least value from `low` on, or the most below `high`: the most of all at most `limit` times
  // -1 or 1.
  const bool from_above = low_count != rank && high_count == rank - 1.0f;
  const float my_sign = from_above ? 1.0f : -1.0f;
  const float my_limit = from_above ? __int_as_float(__float_as_int(high) - 1) : -low;
  const float other_sign = __shfl_xor_sync(~0u, my_sign, 1);
  const float other_limit = __shfl_xor_sync(~0u, my_limit, 1);
#pragma unroll
  for (int a = 0; a < 2; ++a) {
    const bool mine = second == (a == 1);
    const float sign = mine ? my_sign : other_sign, limit = mine ? my_limit : other_limit;
    float most = -INFINITY;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const float signed_value = fabsf(at(a, i)) * sign;
      if (signed_value <= limit) most = fmaxf(most, signed_value);
    }
    found[a] = fabsf(MaxOverChannels(most));
  }
}

// The same over all values of the rows.
template <class T>
__device__ __forceinline__ void LargestOfAll(const float (&y)[T::kTiles][4], const ClipGuess& clip,
                                             RowFacts* facts) {
  float peak[2] = {0.0f, 0.0f};
#pragma unroll
  for (int n = 0; n < T::kTiles; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) peak[i / 2] = fmaxf(peak[i / 2], fabsf(y[n][i]));
  }
#pragma unroll
  for (int a = 0; a < 2; ++a) peak[a] = MaxOverChannels(peak[a]);
  const float lows[2] = {0.0f, 0.0f};
  const int low_counts[2] = {T::kDim, T::kDim};
  LargestMagnitudes<2 * T::kTiles>([&](int a, int i) -> float { return y[i / 2][2 * a + i % 2]; },
                                   clip, facts->sigma, lows, low_counts, peak, facts->threshold);
}

inline constexpr int kCandidatesMax = 12;  // of a lane and row

// Bytes of shared memory that a warp's search needs: a column of each lane's values of one row.
template <class T>
inline constexpr int kCandidateBytes = 32 * T::kDim;

// The few values of row r + 8 a that can matter are gathered first: those above a guess that lies
// well below the threshold. scratch: this lane's column. Returns how many there are, and the first
// kCandidatesMax of them, with zeros behind them.
template <class T, int a>
__device__ __forceinline__ int Gather(const float (&y)[T::kTiles][4], float bound, float* scratch,
                                      float (&values)[kCandidatesMax]) {
  const uint32_t begin = ptx::SharedAddress(scratch);
  uint32_t end = begin;
#pragma unroll
  for (int n = 0; n < T::kTiles; ++n) {
#pragma unroll
    for (int e = 0; e < 2; ++e) ptx::AppendIfAtLeast(y[n][2 * a + e], bound, 128, &end);
  }
  const int count = static_cast<int>(end - begin) / 128;
#pragma unroll
  for (int i = 0; i < kCandidatesMax; ++i) values[i] = i < count ? scratch[32 * i] : 0.0f;
  return count;
}

// Fills in threshold and reaches_*. scratch: kCandidateBytes that only this warp uses.
template <class T>
__device__ __forceinline__ void FindThresholds(const float (&y)[T::kTiles][4],
                                               const ClipGuess& clip, float* scratch,
                                               RowFacts* facts) {
  scratch += threadIdx.x % 32;
  float values[2][kCandidatesMax];
  const int counts[2] = {Gather<T, 0>(y, facts->sigma[0] * clip.filter, scratch, values[0]),
                         Gather<T, 1>(y, facts->sigma[1] * clip.filter, scratch, values[1])};
  const int sum = SumOverChannels(counts[0] | counts[1] << 16);
  const int found[2] = {sum & 0xffff, sum >> 16};
  const bool enough =
      min(found[0], found[1]) >= clip.rank && max(counts[0], counts[1]) <= kCandidatesMax;
  if (!__all_sync(~0u, enough)) {
    LargestOfAll<T>(y, clip, facts);
    return;
  }
  float least[2] = {0.0f, 0.0f}, most[2] = {0.0f, 0.0f}, peak[2];
#pragma unroll
  for (int a = 0; a < 2; ++a) {
#pragma unroll
    for (int i = 0; i < kCandidatesMax; ++i) {
      least[a] = fminf(least[a], values[a][i]);
      most[a] = fmaxf(most[a], values[a][i]);
    }
    least[a] = MinOverChannels(least[a]);
    most[a] = MaxOverChannels(most[a]);
    peak[a] = fmaxf(most[a], -least[a]);
  }
  const float lows[2] = {facts->sigma[0] * clip.filter, facts->sigma[1] * clip.filter};
  LargestMagnitudes<kCandidatesMax>([&](int a, int i) -> float { return values[a][i]; }, clip,
                                    facts->sigma, lows, found, peak, facts->threshold);
#pragma unroll
  for (int a = 0; a < 2; ++a) {
    facts->reaches_low[a] = -least[a] >= facts->threshold[a];
    facts->reaches_high[a] = most[a] >= facts->threshold[a];
  }
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
  float low[2], high[2];
  bool known = T::kGroups == 1;
#pragma unroll
  for (int a = 0; a < 2; ++a) {
    low[a] = -facts.threshold[a];
    high[a] = facts.threshold[a];
    known &= facts.reaches_low[a] && facts.reaches_high[a];
  }
  if (!__all_sync(~0u, known)) {
#pragma unroll
    for (int a = 0; a < 2; ++a) {
      float least = facts.threshold[a], most = -facts.threshold[a];
#pragma unroll
      for (int n = 0; n < T::kTiles; ++n) {
        if (n / T::kGroupTiles != g) continue;
        least = fminf(least, fminf(y[n][2 * a], y[n][2 * a + 1]));
        most = fmaxf(most, fmaxf(y[n][2 * a], y[n][2 * a + 1]));
      }
      low[a] = fmaxf(MinOverChannels(least), -facts.threshold[a]);
      high[a] = fminf(MaxOverChannels(most), facts.threshold[a]);
    }
  }
  RowRange found;
#pragma unroll
  for (int a = 0; a < 2; ++a) {
    found.low[a] = low[a];
    found.range[a] = fminf(fmaxf(__fsub_rn(high[a], low[a]), 1e-8f), FLT_MAX);
  }
  return found;
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
      const float scale = __fdiv_rn(ranges[g].range[a], 3.0f);
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

// The same but for values within some 2^-20 of the range of a bound between two codes.
template <class T>
__device__ __forceinline__ void RoundNearly(const float (&y)[T::kTiles][4],
                                            const RowRange (&ranges)[T::kGroups],
                                            uint32_t (&words)[T::kTiles / 4]) {
  constexpr float kMagic = 12582912.0f;  // 1.5 * 2^23: whole numbers are its low bits
  constexpr uint32_t kMagicBits = 0x4b400000u;
#pragma unroll
  for (int i = 0; i < T::kTiles / 4; ++i) words[i] = 0u - kMagicBits * 0x55555555u;
#pragma unroll
  for (int g = 0; g < T::kGroups; ++g) {
    float factor[2], offset[2];
#pragma unroll
    for (int a = 0; a < 2; ++a) {
      factor[a] = __fdividef(1.0f, ranges[g].range[a]);
      offset[a] = -ranges[g].low[a] * factor[a];
    }
#pragma unroll
    for (int n = g * T::kGroupTiles; n < (g + 1) * T::kGroupTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float place = __saturatef(fmaf(y[n][i], factor[i / 2], offset[i / 2]));
        words[2 * (n / 8) + i / 2] += __float_as_uint(fmaf(place, 3.0f, kMagic))
                                      << (2 * (n % 8) + 16 * (i % 2));
      }
    }
  }
}

// Codes and metadata of 16 rows. words[2 p + a]: the word of channels 64 p .. 64 p + 63, row r + 8
// a, in K's order. meta[y][a]: valid in every lane of the row. exact: y is the scalar definition's,
// so the codes can be. Returns status bits of the lane's rows.
template <class T>
__device__ __forceinline__ uint32_t RoundRows(const float (&y)[T::kTiles][4], const RowFacts& facts,
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
      bool saturated = false;
      meta[g][a] = HalfBits(__fdiv_rn(range, 3.0f), &saturated) |
                   HalfBits(ranges[g].low[a], &saturated) << 16;
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
