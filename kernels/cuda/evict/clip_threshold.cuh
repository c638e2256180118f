// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cfloat>
#include <cstdint>

#include "kernels/cuda/common/ptx.cuh"
#include "kernels/cuda/evict/clip_guess.h"
#include "kernels/cuda/evict/evict_ptx.cuh"

// The clip threshold of the 16 rows of a warp, which are MMA accumulators: y[n][2 a + e] is row
// r + 8 a, channel 8 n + 2 c + e of lane 4 r + c. The threshold is an order statistic of a row's
// magnitudes. It is found by counting how many of them reach a bound that closes in, at first among
// halves (two rows at once), and is exact (docs/kernels/evict.md, step 4).
namespace crumb::kernels::cuda {

template <int dim, int group_size>
struct RowTraits {
  static constexpr int kDim = dim;
  static constexpr int kTiles = dim / 8;  // tiles of 8 channels
  static constexpr int kGroups = dim / group_size;
  static constexpr int kGroupTiles = group_size / 8;
};

// Values of a whole row are held by half of the four lanes that share it: row r by the even lanes,
// row r + 8 by the odd ones. That row is called the lane's own row; each value is then computed
// once instead of twice.
__device__ __forceinline__ bool OwnsSecondRow() { return threadIdx.x % 2 != 0; }
template <class Value>
__device__ __forceinline__ Value SelectOwnRow(const Value (&of)[2]) {
  return OwnsSecondRow() ? of[1] : of[0];
}
// Sets of[a] to the value of row r + 8 a, from the value that each lane has of its own row.
template <class Value>
__device__ __forceinline__ void GetBothRows(Value mine, Value (&of)[2]) {
  const Value other = __shfl_xor_sync(~0u, mine, 1);
  of[0] = OwnsSecondRow() ? other : mine;
  of[1] = OwnsSecondRow() ? mine : other;
}
// Reduces over the four lanes that share rows, for the lane's own row. of[a] is this lane's part of
// row r + 8 a.
template <class Value, class Join>
__device__ __forceinline__ Value ReduceOwnRow(const Value (&of)[2], Join join) {
  const Value other = OwnsSecondRow() ? of[0] : of[1];
  const Value mine = join(SelectOwnRow(of), __shfl_xor_sync(~0u, other, 1));
  return join(mine, __shfl_xor_sync(~0u, mine, 2));
}

// Properties of the lane's own row.
struct RowFacts {
  bool finite;
  float least, most;
  float threshold;  // largest |y| inside the clip range
  float squares;    // sum of squares, if SumSquares was called

  __device__ __forceinline__ float Peak() const { return fmaxf(-least, most); }
};

// FindExtremes for rows of which one may not be finite.
template <class T>
__device__ __forceinline__ void FindExtremesExactly(const float (&y)[T::kTiles][4],
                                                    RowFacts* facts) {
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
        poison[a] = fmaf(y[n][2 * a + e], 0.0f, poison[a]);  // NaN if any value is not finite
      }
    }
  }
  facts->finite = ReduceOwnRow(poison, [](float x, float y) { return x + y; }) == 0.0f;
  const float all_least = ReduceOwnRow(least, [](float x, float y) { return fminf(x, y); });
  const float all_most = ReduceOwnRow(most, [](float x, float y) { return fmaxf(x, y); });
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
  return ReduceOwnRow(sums, [](float x, float y) { return x + y; });
}

// Finds rows' extremes, which are set to zero for rows that are not finite. y itself is not
// changed: a path that modified it alone would force all 64 accumulators to be moved where paths
// meet.
template <class T>
__device__ __forceinline__ void FindExtremes(const float (&y)[T::kTiles][4], RowFacts* facts) {
  // Compared as signed integers, the maximum of floats is their maximum. Compared as unsigned
  // integers, the maximum is the least float if one is negative.
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
  const int most = ReduceOwnRow(most_bits, [](int x, int y) { return max(x, y); });
  const uint32_t least = ReduceOwnRow(least_bits, [](uint32_t x, uint32_t y) { return max(x, y); });
  facts->finite = true;
  facts->most = __int_as_float(most);
  facts->least = __uint_as_float(least);
  facts->threshold = FLT_MAX;
  const bool finite =
      static_cast<uint32_t>(most) < 0x7f800000u && least - 0x80000000u < 0x7f800000u;
  if (!__all_sync(~0u, finite)) FindExtremesExactly<T>(y, facts);
}

// Returns 1 if magnitude >= bound, else 0.
__device__ __forceinline__ float AtLeast(float magnitude, float bound) {
  float one;
  asm("set.ge.f32.f32 %0, %1, %2;" : "=f"(one) : "f"(magnitude), "f"(bound));
  return one;
}

// A bound near the clip threshold: `rank` values or one less lie at or above it, or (`second`) one
// more or two less.
struct Neighbour {
  float bound;
  // whether the threshold is the largest value below the bound, else the least from the bound on
  bool above;
  bool second;  // whether the threshold is the value after that one
};

// Finds a bound for the lane's own row, for any values. Counts the values at or above a bound that
// closes in by interpolation, and by bisection of the floats' bits if that does not converge.
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
    GetBothRows(bound, bounds);
#pragma unroll
    for (int n = 0; n < T::kTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) counts[i / 2] += AtLeast(fabsf(y[n][i]), bounds[i / 2]);
    }
    const float count = ReduceOwnRow(counts, [](float x, float y) { return x + y; });
    if (!done) {
      const bool below = count >= rank;
      low = below ? bound : low;
      low_count = below ? count : low_count;
      high = below ? high : bound;
      high_count = below ? high_count : count;
      // With no float between the bounds the threshold is `low` itself.
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

// Rows as halves, rounded towards zero, so that magnitudes keep their order against any bound that
// a half can represent. The low half is of row r, the high half of row r + 8 in the same channel.
template <class T>
using RowHalves = uint32_t[2 * T::kTiles];

// Returns an estimate of the sum of magnitudes of the lane's own row. REQUIRES: no magnitude is
// above kHalfMost, so that sums of 16 stay finite.
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

// Returns, for both rows, 1024 plus twice the number of magnitudes that are at least `bounds`, as
// halves.
template <class T>
__device__ __forceinline__ uint32_t CountAtLeast(const RowHalves<T>& halves, uint32_t bounds) {
  // Each comparison gives a 16-bit -1 per half, so the negated sum is (high - low) * 2^16 + low.
  // The final multiplication turns it into two counts and the four lanes' 1024 / 8 into the
  // exponent of 1024.
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

// Finds bounds by counting halves. The lanes of a row search for both of its rows r and r + 8;
// `found` is that of the lane's own row. Returns false if a row of the warp has too many values
// that are equal as halves.
template <class T, bool kSquares>
__device__ __forceinline__ bool SearchInHalves(const RowHalves<T>& halves, const ClipGuess& clip,
                                               const RowFacts& facts, Neighbour* found) {
  constexpr int kRoundsMax = 10;
  // Ratio, for a normal distribution, of the squared sum of magnitudes to the sum of squares.
  constexpr float kRatio = 0.63661977f * T::kDim;  // 2 / pi per channel
  // Steps that are a little too short converge in fewer passes.
  constexpr float kShort = 0.8f;
  const float sum = kSquares ? ptx::SquareRoot(kRatio * facts.squares) : SumMagnitudes<T>(halves);
  // The four lanes of a row have the same values, and all of them search for both rows.
  float both[2];
  GetBothRows(sum, both);
  const float first = clip.first, one_step = 0.5f * kShort * clip.step;
  uint32_t bounds = ptx::PackHalf(both[0] * first, both[1] * first);
  const uint32_t step = ptx::PackHalf(both[0] * one_step, both[1] * one_step);
  // Counts are compared with the middle between `rank` and `rank` - 1, doubled: differences are odd
  // numbers.
  const float middle_of_one = -1023.0f - 2.0f * static_cast<float>(clip.rank);
  const uint32_t middle = ptx::PackHalf(middle_of_one, middle_of_one);
  constexpr uint32_t kNear = 0x42004200u;  // two halves of 3
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
    // The step of a normal distribution applies until bounds on both sides allow interpolation.
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
  // A step may have led below zero, where there is no magnitude.
  found->bound = fmaxf(ptx::LowHalf(mine), 0.0f);
  const uint32_t my_count = OwnsSecondRow() ? count : count << 16;
  found->above = my_count >> 31 != 0;
  found->second = (my_count & 0x40000000u) != 0;
  return __all_sync(~0u, done == ~0u);
}

// The least two of a set of numbers.
struct Two {
  uint32_t least, second;
};
__device__ __forceinline__ Two JoinWithLane(const Two& mine, const Two& theirs, int lanes) {
  const uint32_t least = __shfl_xor_sync(~0u, theirs.least, lanes);
  const uint32_t second = __shfl_xor_sync(~0u, theirs.second, lanes);
  return {min(mine.least, least), __vimin3_u32(max(mine.least, least), mine.second, second)};
}
// Reduces the least two numbers of rows r and r + 8 to those of the lane's own row.
__device__ __forceinline__ Two ReduceOwnRow(const Two& first, const Two& other) {
  const Two mine = OwnsSecondRow() ? other : first, theirs = OwnsSecondRow() ? first : other;
  const Two both = JoinWithLane(mine, theirs, 1);
  return JoinWithLane(both, both, 2);
}

// Returns the magnitude next to the bound of the lane's own row; kSecond: or the one after it if
// found.second.
template <class T, bool kSecond>
__device__ __forceinline__ float TakeNeighbour(const float (&y)[T::kTiles][4],
                                               const Neighbour& found) {
  // Twice a float's bits, modulo 2^32, are twice its magnitude's bits. Multiplication by 2 or -2
  // therefore gives distances from the bound upwards or, from the float below the bound, downwards.
  // Values on the other side wrap around to large distances.
  const uint32_t bits = __float_as_uint(found.bound);
  const uint32_t my_factor = found.above ? ~1u : 2u;
  const uint32_t my_offset = found.above ? 2 * bits - 2 : 0u - 2 * bits;
  uint32_t factor[2], offset[2], least[2];
  GetBothRows(my_factor, factor);
  GetBothRows(my_offset, offset);
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
    const Two two = ReduceOwnRow(Two{least[0], second[0]}, Two{least[1], second[1]});
    nearest = found.second ? two.second : two.least;
  } else {
    nearest = ReduceOwnRow(least, [](uint32_t x, uint32_t y) { return min(x, y); });
  }
  const uint32_t twice = found.above ? my_offset - nearest : nearest - my_offset;
  return __uint_as_float(twice / 2);
}

// Sets facts->threshold. kSquares: facts->squares is set and gives the first bound, which saves the
// sum of magnitudes.
template <class T, bool kSquares>
__device__ __forceinline__ void FindThresholds(const float (&y)[T::kTiles][4],
                                               const ClipGuess& clip, RowFacts* facts) {
  // Halves can represent neither larger values nor, with enough bits, smaller ones.
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
  // SearchInFloats ends directly next to the threshold.
  facts->threshold = ended ? TakeNeighbour<T, true>(y, found) : TakeNeighbour<T, false>(y, found);
}

}  // namespace crumb::kernels::cuda
