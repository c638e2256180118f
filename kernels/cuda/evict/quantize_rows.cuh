// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_fp16.h>

#include <cfloat>
#include <cstdint>

#include "kernels/cuda/common/ptx.cuh"
#include "kernels/cuda/evict/clip_guess.h"
#include "kernels/cuda/evict/evict_ptx.cuh"
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

// What is known of a row as a whole lies with half of the lanes that share it: row r with even
// ones, row r + 8 with odd ones. That row is the lane's own.
__device__ __forceinline__ bool OwnsSecondRow() { return threadIdx.x % 2 != 0; }
template <class Value>
__device__ __forceinline__ Value OfOwnRow(const Value (&of)[2]) {
  return OwnsSecondRow() ? of[1] : of[0];
}
// of[a]: of row r + 8 a, from what each lane has of its own.
template <class Value>
__device__ __forceinline__ void OfBothRows(Value mine, Value (&of)[2]) {
  const Value other = __shfl_xor_sync(~0u, mine, 1);
  of[0] = OwnsSecondRow() ? other : mine;
  of[1] = OwnsSecondRow() ? mine : other;
}
// Over the 4 lanes that share rows, of the lane's own row. of[a]: this lane's part of row r + 8 a.
template <class Value, class Join>
__device__ __forceinline__ Value JoinOwnRow(const Value (&of)[2], Join join) {
  const Value other = OwnsSecondRow() ? of[0] : of[1];
  const Value mine = join(OfOwnRow(of), __shfl_xor_sync(~0u, other, 1));
  return join(mine, __shfl_xor_sync(~0u, mine, 2));
}

// --- The clip threshold ----------------------------------------------------------------------

// Of the lane's own row.
struct RowFacts {
  bool finite;
  float least, most;
  float threshold;  // largest |y| inside the range
  float squares;    // their sum, where somebody asked for it

  __device__ __forceinline__ float Peak() const { return fmaxf(-least, most); }
};

// The same for any rows.
template <class T>
__device__ __forceinline__ void LookCloser(const float (&y)[T::kTiles][4], RowFacts* facts) {
  float least[2], most[2], poison[2];
#pragma unroll
  for (int a = 0; a < 2; ++a) {
    least[a] = most[a] = y[0][2 * a];
    poison[a] = 0.0f;
#pragma unroll
    for (int n = 0; n < T::kTiles; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        least[a] = fminf(least[a], y[n][2 * a + e]);
        most[a] = fmaxf(most[a], y[n][2 * a + e]);
        poison[a] = fmaf(y[n][2 * a + e], 0.0f, poison[a]);  // NaN as soon as one is not finite
      }
    }
  }
  facts->finite = JoinOwnRow(poison, [](float x, float y) { return x + y; }) == 0.0f;
  const float all_least = JoinOwnRow(least, [](float x, float y) { return fminf(x, y); });
  const float all_most = JoinOwnRow(most, [](float x, float y) { return fmaxf(x, y); });
  facts->least = facts->finite ? all_least : 0.0f;
  facts->most = facts->finite ? all_most : 0.0f;
}

template <class T>
__device__ __forceinline__ float SumSquares(const float (&y)[T::kTiles][4]) {
  float sums[2] = {};
#pragma unroll
  for (int n = 0; n < T::kTiles; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) sums[i / 2] = fmaf(y[n][i], y[n][i], sums[i / 2]);
  }
  return JoinOwnRow(sums, [](float x, float y) { return x + y; });
}

// Rows' extremes, zeros for rows with values that are not finite. Those values stay where they are:
// whoever changed y on a path of its own would have all of it moved on the others.
template <class T>
__device__ __forceinline__ void LookAtRows(const float (&y)[T::kTiles][4], RowFacts* facts) {
  // Among floats as signed numbers the most is the most; as unsigned ones it is the least, if one
  // is negative.
  int most_bits[2];
  uint32_t least_bits[2];
#pragma unroll
  for (int a = 0; a < 2; ++a) {
    most_bits[a] = max(__float_as_int(y[0][2 * a]), __float_as_int(y[0][2 * a + 1]));
    least_bits[a] = max(__float_as_uint(y[0][2 * a]), __float_as_uint(y[0][2 * a + 1]));
#pragma unroll
    for (int n = 1; n < T::kTiles; ++n) {
      const float one = y[n][2 * a], other = y[n][2 * a + 1];
      most_bits[a] = __vimax3_s32(most_bits[a], __float_as_int(one), __float_as_int(other));
      least_bits[a] = __vimax3_u32(least_bits[a], __float_as_uint(one), __float_as_uint(other));
    }
  }
  const int most = JoinOwnRow(most_bits, [](int x, int y) { return max(x, y); });
  const uint32_t least = JoinOwnRow(least_bits, [](uint32_t x, uint32_t y) { return max(x, y); });
  facts->finite = true;
  facts->most = __int_as_float(most);
  facts->least = __uint_as_float(least);
  facts->threshold = FLT_MAX;
  const bool plain = static_cast<uint32_t>(most) < 0x7f800000u && least - 0x80000000u < 0x7f800000u;
  if (!__all_sync(~0u, plain)) LookCloser<T>(y, facts);
}

// 1 if magnitude >= bound, else 0.
__device__ __forceinline__ float AtLeast(float magnitude, float bound) {
  float one;
  asm("set.ge.f32.f32 %0, %1, %2;" : "=f"(one) : "f"(magnitude), "f"(bound));
  return one;
}

// A bound with `rank` values at or above it, or one less; or with one more or two less.
struct Neighbour {
  float bound;
  bool above;   // the threshold is the most below the bound, else the least from it on
  bool second;  // the one next to that
};

// A bound for the lane's own row, whatever the rows. Counts values at and above a
// bound that closes in, interpolated at first, in the bits of floats when that does not end it.
template <class T>
__device__ __forceinline__ Neighbour SearchInFloats(const float (&y)[T::kTiles][4],
                                                    const ClipGuess& clip, const RowFacts& facts) {
  const float rank = static_cast<float>(clip.rank);
  float low = 0.0f, low_count = T::kDim, high_count = 0.0f;
  float high = __int_as_float(__float_as_int(facts.Peak()) + 1);
  float bound = 0.5f * facts.Peak();
  bool done = false;
#pragma unroll 1
  for (int round = 0; round < 48; ++round) {
    if (!done && (round >= 8 || !(bound > low && bound < high))) {
      const int begin = __float_as_int(low);
      bound = __int_as_float(begin + (__float_as_int(high) - begin) / 2);
    }
    float bounds[2], counts[2] = {0.0f, 0.0f};
    OfBothRows(bound, bounds);
#pragma unroll
    for (int n = 0; n < T::kTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) counts[i / 2] += AtLeast(fabsf(y[n][i]), bounds[i / 2]);
    }
    const float count = JoinOwnRow(counts, [](float x, float y) { return x + y; });
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
  return {above ? high : low, above, false};
}

// Rows as halves, rounded towards zero: magnitudes keep their order against any bound that a half
// can hold. Row r's value is the low half, that of row r + 8 in the same channel the high one.
template <class T>
using RowHalves = uint32_t[2 * T::kTiles];

// The magnitudes' sum in the lane's own row, near enough for a guess. No magnitude is above
// kHalfMost.
inline constexpr float kHalfMost = 2047.0f;
template <class T>
__device__ __forceinline__ float SumMagnitudes(const RowHalves<T>& halves) {
  uint32_t parts[4];
#pragma unroll
  for (int n = 0; n < 4; ++n) parts[n] = ptx::AddMagnitudes(halves[2 * n], halves[2 * n + 1]);
#pragma unroll
  for (int n = 8; n < 2 * T::kTiles; ++n) {
    parts[n % 4] = ptx::AddMagnitudes(parts[n % 4], halves[n]);
  }
  uint32_t sum =
      ptx::AddHalves(ptx::AddHalves(parts[0], parts[1]), ptx::AddHalves(parts[2], parts[3]));
  sum = ptx::AddHalves(sum, __shfl_xor_sync(~0u, sum, 1));
  sum = ptx::AddHalves(sum, __shfl_xor_sync(~0u, sum, 2));
  return ptx::LowHalf(OwnsSecondRow() ? sum >> 16 : sum);
}

// Twice the number of magnitudes that are at least `bounds`, as halves on top of 1024.
template <class T>
__device__ __forceinline__ uint32_t CountAtLeast(const RowHalves<T>& halves, uint32_t bounds) {
  // Ones of a pair are 16-bit -1s: the sum's negative is (high - low) 2^16 + low. Four lanes' parts
  // of 1024 become it by the last multiplication.
  uint32_t sums[2] = {0x6400 / 8, 0};
#pragma unroll
  for (int n = 0; n < 2 * T::kTiles; n += 4) {
#pragma unroll
    for (int a = 0; a < 2; ++a) {
      sums[a] = sums[a] - ptx::MagnitudesAtLeast(halves[n + a], bounds) -
                ptx::MagnitudesAtLeast(halves[n + 2 + a], bounds);
    }
  }
  const uint32_t sum = sums[0] + sums[1];
  const uint32_t others = __shfl_xor_sync(~0u, sum, 1) + __shfl_xor_sync(~0u, sum, 2);
  const uint32_t all = sum + others + __shfl_xor_sync(~0u, sum, 3);
  return 0x20002u * all;
}

// Bounds for rows r and r + 8, as halves of a pair, and for the lane's own row. False if one of the
// warp's rows has too many values that are the same as halves.
template <class T, bool kSquares>
__device__ __forceinline__ bool SearchInHalves(const RowHalves<T>& halves, const ClipGuess& clip,
                                               const RowFacts& facts, Neighbour* found) {
  constexpr int kRoundsMax = 10;
  // Of a normal distribution: a sum of magnitudes squared, to the sum of squares.
  constexpr float kRatio = 0.63661977f * T::kDim;  // 2 / pi of each
  // Steps a little short of it end sooner.
  constexpr float kShort = 0.8f;
  const float sum = kSquares ? ptx::SquareRoot(kRatio * facts.squares) : SumMagnitudes<T>(halves);
  // The lanes of a row have the same: all of them search for both.
  float both[2];
  OfBothRows(sum, both);
  const float first = clip.first, one_step = 0.5f * kShort * clip.step;
  uint32_t bounds = ptx::PackHalf(both[0] * first, both[1] * first);
  const uint32_t step = ptx::PackHalf(both[0] * one_step, both[1] * one_step);
  // Counts less the middle between `rank` and one less, twice: odd numbers.
  const float middle_of_one = -1023.0f - 2.0f * static_cast<float>(clip.rank);
  const uint32_t middle = ptx::PackHalf(middle_of_one, middle_of_one);
  constexpr uint32_t kNear = 0x42004200u;  // 3
  uint32_t low = 0, low_count = 0, high = 0, high_count = 0, count, done = 0;
#pragma unroll 1
  for (int round = 0; round < kRoundsMax; ++round) {
    count = ptx::AddHalves(CountAtLeast<T>(halves, bounds), middle);
    done = ptx::MagnitudesAtMost(count, kNear);
    if (__all_sync(~0u, done == ~0u)) break;
    const uint32_t below = ptx::HalvesAbove(count, 0);
    low = ptx::Select(below, bounds, low);
    low_count = ptx::Select(below, count, low_count);
    high = ptx::Select(below, high, bounds);
    high_count = ptx::Select(below, high_count, count);
    // A normal distribution's step, until there are values on both sides to go by.
    const uint32_t all = ptx::SubtractHalves(low_count, high_count);
    const uint32_t inverse =
        ptx::PackHalf(ptx::Reciprocal(ptx::LowHalf(all)), ptx::Reciprocal(ptx::HighHalf(all)));
    const uint32_t between = ptx::MultiplyAddHalves(ptx::MultiplyHalves(low_count, inverse),
                                                    ptx::SubtractHalves(high, low), low);
    const uint32_t further = ptx::MultiplyAddHalves(count, step, bounds);
    const uint32_t closed = ptx::HalvesAbove(0, ptx::MultiplyHalves(low_count, high_count));
    bounds = ptx::Select(done, bounds, ptx::Select(closed, between, further));
  }
  const uint32_t mine = OwnsSecondRow() ? bounds >> 16 : bounds;
  // A step may have led below zero, where no magnitude is.
  found->bound = fmaxf(ptx::LowHalf(mine), 0.0f);
  const uint32_t my_count = OwnsSecondRow() ? count : count << 16;
  found->above = my_count >> 31 != 0;
  found->second = (my_count & 0x40000000u) != 0;
  return __all_sync(~0u, done == ~0u);
}

// The least two of some numbers.
struct Two {
  uint32_t least, second;
};
__device__ __forceinline__ Two JoinWithLane(const Two& mine, const Two& theirs, int lanes) {
  const uint32_t least = __shfl_xor_sync(~0u, theirs.least, lanes);
  const uint32_t second = __shfl_xor_sync(~0u, theirs.second, lanes);
  return {min(mine.least, least), __vimin3_u32(max(mine.least, least), mine.second, second)};
}
// JoinOwnRow for rows r and r + 8.
__device__ __forceinline__ Two JoinOwnRow(const Two& first, const Two& other) {
  const Two mine = OwnsSecondRow() ? other : first, theirs = OwnsSecondRow() ? first : other;
  const Two both = JoinWithLane(mine, theirs, 1);
  return JoinWithLane(both, both, 2);
}

// The magnitude next to the bound of the lane's own row; kSecond: or the one next to that.
template <class T, bool kSecond>
__device__ __forceinline__ float TakeNeighbour(const float (&y)[T::kTiles][4],
                                               const Neighbour& found) {
  // Twice a float's bits, modulo 2^32, are twice its magnitude's. Distances from the bound:
  // upwards, or, from the float below it, downwards. Those on the other side wrap around and are
  // large.
  const uint32_t bits = __float_as_uint(found.bound);
  const uint32_t my_factor = found.above ? ~1u : 2u;
  const uint32_t my_offset = found.above ? 2 * bits - 2 : 0u - 2 * bits;
  uint32_t factor[2], offset[2], least[2];
  OfBothRows(my_factor, factor);
  OfBothRows(my_offset, offset);
  uint32_t second[2];
#pragma unroll
  for (int a = 0; a < 2; ++a) {
    least[a] = second[a] = ~0u;
#pragma unroll
    for (int n = 0; n < T::kTiles; ++n) {
      const uint32_t one = __float_as_uint(y[n][2 * a]) * factor[a] + offset[a];
      const uint32_t other = __float_as_uint(y[n][2 * a + 1]) * factor[a] + offset[a];
      if constexpr (kSecond) {
        second[a] = __vimin3_u32(second[a], max(one, other), max(least[a], min(one, other)));
      }
      least[a] = __vimin3_u32(least[a], one, other);
    }
  }
  uint32_t nearest;
  if constexpr (kSecond) {
    const Two two = JoinOwnRow(Two{least[0], second[0]}, Two{least[1], second[1]});
    nearest = found.second ? two.second : two.least;
  } else {
    nearest = JoinOwnRow(least, [](uint32_t x, uint32_t y) { return min(x, y); });
  }
  const uint32_t twice = found.above ? my_offset - nearest : nearest - my_offset;
  return __uint_as_float(twice / 2);
}

// Fills in threshold. kSquares: squares are there, by which it is found a little sooner.
template <class T, bool kSquares>
__device__ __forceinline__ void FindThresholds(const float (&y)[T::kTiles][4],
                                               const ClipGuess& clip, RowFacts* facts) {
  // Halves hold neither larger values nor, in enough bits, smaller ones.
  constexpr float kLeast = 0x1p-12f;
  const float peak = facts->Peak();
  Neighbour found;
  bool ended = __all_sync(~0u, peak < kHalfMost && peak > kLeast);
  if (ended) {
    RowHalves<T> halves;
#pragma unroll
    for (int n = 0; n < T::kTiles; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        halves[2 * n + e] = ptx::PackHalfTowardsZero(y[n][e], y[n][2 + e]);
      }
    }
    ended = SearchInHalves<T, kSquares>(halves, clip, *facts, &found);
  }
  if (!ended) found = SearchInFloats<T>(y, clip, *facts);
  // Among floats a search ends next to it.
  facts->threshold = ended ? TakeNeighbour<T, true>(y, found) : TakeNeighbour<T, false>(y, found);
}

// --- Ranges ----------------------------------------------------------------------------------

// Of the lane's own row.
struct RowRange {
  float low;    // least clipped value
  float range;  // most - least, at least 1e-8
};

// Of group g.
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
    least = JoinOwnRow(leasts, [](float x, float y) { return fminf(x, y); });
    most = JoinOwnRow(mosts, [](float x, float y) { return fmaxf(x, y); });
  }
  RowRange found;
  found.low = fminf(fmaxf(least, -facts.threshold), facts.threshold);
  const float high = fmaxf(fminf(most, facts.threshold), -facts.threshold);
  found.range = fminf(fmaxf(__fsub_rn(high, found.low), 1e-8f), FLT_MAX);
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

// The words of codes for ranges[g]. Exactly the scalar definition's, zero for rows that are not
// finite: NaN saturates to zero.
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
    OfBothRows(my_factor, factor);
    OfBothRows(my_scale, scale);
    OfBothRows(ranges[g].low, low);
#pragma unroll
    for (int a = 0; a < 2; ++a) {
      // Each of three lanes finds one bound; a step begins behind the float below it.
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
    float factor[2];
    OfBothRows(3.0f * ptx::Reciprocal(ranges[g].range), factor);
    const float my_middle = fmaf(0.5f, ranges[g].range, ranges[g].low);
    // Clipped on both sides it is zero.
    if (__any_sync(~0u, my_middle != 0.0f)) {
      float middle[2];
      OfBothRows(my_middle, middle);
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

// Scale and minimum of a row: ratio times the range's. Status bits.
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

// Codes and metadata of 16 rows. words[2 p + a]: the word of channels 64 p .. 64 p + 63, row r + 8
// a, in K's order. meta[g]: of the lane's own row. exact: y is the scalar definition's, so the
// codes can be. Returns status bits of the lane's own row.
template <class T>
__device__ __forceinline__ uint32_t RoundRows(float (&y)[T::kTiles][4], const RowFacts& facts,
                                              bool exact, uint32_t (&words)[T::kTiles / 4],
                                              uint32_t (&meta)[T::kGroups]) {
  uint32_t status = 0;
  RowRange ranges[T::kGroups];
#pragma unroll
  for (int g = 0; g < T::kGroups; ++g) {
    ranges[g] = FindRange<T>(y, facts, g);
    // The scalar definition negates the largest of 0 - y: its zero is negative.
    if (ranges[g].low == 0.0f) ranges[g].low = -0.0f;
    // Far from zero and narrow, or beyond what an inverse can be: not by one multiplication.
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
