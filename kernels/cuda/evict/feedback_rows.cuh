// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_fp16.h>

#include <cfloat>
#include <cstdint>

#include "kernels/cuda/common/ptx.cuh"
#include "kernels/cuda/evict/constants.h"
#include "kernels/cuda/evict/quantize_rows.cuh"
#include "kernels/quantize.h"

// The method `crumb` on 16 rows of a warp: rounding that passes each channel's error on to the
// channels behind it, and a scale that keeps a row's inner product with itself. Rows stay where the
// product left them, two channels of every eight a lane. What earlier blocks of 16 channels add
// comes from the tensor cores, onto y; within eight channels the four lanes of a row take turns.
namespace crumb::kernels::cuda {

// Beyond it a row's scale and minimum are saturated anyway; up to it no product overflows.
inline constexpr float kFeedbackMagnitudeMax = 0x1p56f;
inline constexpr float kInnerProductRatioMax = 2.0f;
// Beyond it a value's error, in units of its row, may be more than a half holds.
inline constexpr float kErrorMax = 16384.0f;

// Two errors as halves, limited to what these hold.
template <bool kCareful>
__device__ __forceinline__ uint32_t PackErrors(float one, float other) {
  const uint32_t packed = ptx::PackHalf(one, other);
  if (!kCareful) return packed;
  const __half2 limit = __float2half2_rn(65504.0f);
  const __half2 limited =
      __hmax2(__hmin2(reinterpret_cast<const __half2&>(packed), limit), __hneg2(limit));
  return reinterpret_cast<const uint32_t&>(limited);
}

// What rounding a group needs of rows r and r + 8. The unit is the range of the row's widest group.
struct RoundUnits {
  float low[2];
  float factor[2];  // 3 unit / range
  float whole[2];   // range / unit
};

// inverse: 1 / unit. All of the lane's own row.
__device__ __forceinline__ RoundUnits MakeUnits(const RowRange& range, float unit, float inverse) {
  RoundUnits units;
  OfBothRows(range.low, units.low);
  OfBothRows(3.0f * unit * ptx::Reciprocal(range.range), units.factor);
  OfBothRows(range.range * inverse, units.whole);
  return units;
}

// Eight channels. target: y and what earlier channels add; place: y. Both in units above low. own:
// this tile's U. level[i]: the code / 3, or the float below it.
template <bool kOneGroup>
__device__ __forceinline__ void RoundTile(float (&target)[4], const float (&place)[4],
                                          const char* own, const RoundUnits& units,
                                          float (&error)[4], float (&level)[4]) {
  // Whole numbers on top of 1.5 * 2^23 are its low bits. Times the float below 1 / 3 they are exact
  // with the product of both taken away, so one operation takes away, divides and limits.
  constexpr float kMagic = 12582912.0f, kThird = 0x1.555554p-2f, kMagicThird = 4194303.75f;
  const char* mine = own + ptx::Lane() % 4 * 16;
  const float next = *reinterpret_cast<const float*>(mine + 192);
  const auto round = [&](int i, float reached) {
    const float whole = fmaf(reached, kOneGroup ? 3.0f : units.factor[i / 2], kMagic);
    level[i] = __saturatef(fmaf(whole, kThird, -kMagicThird));
    error[i] = kOneGroup ? place[i] - level[i] : fmaf(level[i], -units.whole[i / 2], place[i]);
  };
#pragma unroll
  for (int turn = 0; turn < 4; ++turn) {
    // Every lane rounds both of its channels in every turn; from its own turn on it is for good.
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
      round(i, target[i]);
      round(i + 1, fmaf(error[i], next, target[i + 1]));
    }
    if (turn == 3) break;
    const float4 u = *reinterpret_cast<const float4*>(mine + 64 * turn);
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
      const float first = __shfl_sync(~0u, error[i], turn, 4);
      const float second = __shfl_sync(~0u, error[i + 1], turn, 4);
      target[i] = fmaf(second, u.z, fmaf(first, u.x, target[i]));
      target[i + 1] = fmaf(second, u.w, fmaf(first, u.y, target[i + 1]));
    }
  }
}

// sums = what `first` and `second` have, plus errors of block `from` times U_{from, to}.
template <class T>
__device__ __forceinline__ void AddBlock(const uint32_t (&errors)[T::kTiles / 2][4],
                                         const char* feedback, int from, int to,
                                         const float (&first)[4], const float (&second)[4],
                                         float (&sums)[2][4]) {
  const uint4 u = reinterpret_cast<const uint4*>(feedback + (to * (to - 1) / 2 + from) *
                                                                kFeedbackPairBytes)[ptx::Lane()];
  const auto& e = errors[from];
  ptx::MmaF16Onto(sums[0], first, e, u.x, u.y);
  ptx::MmaF16Onto(sums[1], second, e, u.z, u.w);
}

// sums += errors of a block's first eight channels times U of its others, in enough bits: both as
// two halves. errors: the high ones, of rows r and r + 8; the low ones take the others' place.
template <bool kCareful>
__device__ __forceinline__ void AddTile(const float (&error)[4], uint32_t (&errors)[4],
                                        const char* halves, float (&sums)[4]) {
#pragma unroll
  for (int a = 0; a < 2; ++a) {
    errors[2 + a] = PackErrors<kCareful>(error[2 * a] - ptx::LowHalf(errors[a]),
                                         error[2 * a + 1] - ptx::HighHalf(errors[a]));
  }
  const uint2 u = reinterpret_cast<const uint2*>(halves)[ptx::Lane()];
  ptx::MmaF16(sums, errors[0], errors[1], errors[2], errors[3], u.y, 0);
  ptx::MmaF16(sums, errors[0], errors[1], errors[2], errors[3], u.x, u.x);
}

// a = <y, y> / <y, z> within [1/2, 2]; 1 where <y, z> is not above 0. cross: <y, y - z>.
__device__ __forceinline__ float InnerProductRatio(float own, float cross) {
  const float product = own - cross;
  if (!(product > 0.0f)) return 1.0f;
  return fminf(fmaxf(__fdividef(own, product), 1.0f / kInnerProductRatioMax),
               kInnerProductRatioMax);
}

// y becomes y - low in units. kCareful: values may be beyond their limits, or low far beyond a
// unit. inverse: 1 / unit of the lane's own row, 0 if it is not finite: then it becomes zeros or
// NaN, whose codes are zero. kCareful: returns <y, y> of the lane's
// own row, limited.
template <class T, bool kCareful>
__device__ __forceinline__ float PlaceRows(float (&y)[T::kTiles][4],
                                           const RowRange (&ranges)[T::kGroups], float inverse) {
  float own[2] = {}, inverses[2], low[2], offset[2];
  OfBothRows(inverse, inverses);
#pragma unroll
  for (int n = 0; n < T::kTiles; ++n) {
    if (n % T::kGroupTiles == 0) {
      OfBothRows(ranges[n / T::kGroupTiles].low, low);
#pragma unroll
      for (int a = 0; a < 2; ++a) offset[a] = -low[a] * inverses[a];
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float value = y[n][i];
      if (kCareful) value = fminf(fmaxf(value, -kFeedbackMagnitudeMax), kFeedbackMagnitudeMax);
      if (kCareful) own[i / 2] = fmaf(value, value, own[i / 2]);
      y[n][i] = kCareful ? (value - low[i / 2]) * inverses[i / 2]
                         : fmaf(value, inverses[i / 2], offset[i / 2]);
    }
  }
  return kCareful ? JoinOwnRow(own, [](float x, float y) { return x + y; }) : 0.0f;
}

// Codes of 16 rows, as RoundRows has them. unit: of the lane's own row. y does not survive. Returns
// the ratio of the lane's own row.
template <class T, bool kCareful>
__device__ __forceinline__ float RoundInUnits(float (&y)[T::kTiles][4], const RowFacts& facts,
                                              const RowRange (&ranges)[T::kGroups], float unit,
                                              const char* feedback,
                                              uint32_t (&words)[T::kTiles / 4]) {
  constexpr bool kOneGroup = T::kGroups == 1;
  constexpr int kBlocks = T::kTiles / 2;
  // Codes times powers of 4, on top of it, are the low bits of a float.
  constexpr float kBase = 8388608.0f;
  const float inverse = facts.finite ? ptx::Reciprocal(unit) : 0.0f;
  const float limited = PlaceRows<T, kCareful>(y, ranges, inverse);
  const float own = kCareful ? limited : facts.squares;
  float both_units[2], cross[2] = {};
  OfBothRows(unit, both_units);
  float sums[2][2];
  uint32_t errors[kBlocks][4];
  // Of this block and of the next: y and what earlier channels add.
  float target[2][4], next_target[2][4];
  RoundUnits units;
#pragma unroll
  for (int block = 0; block < kBlocks; ++block) {
    const char* constants = feedback + kFeedbackOwnOffset<T::kDim> + block * kFeedbackOwnBytes;
    if (2 * block % T::kGroupTiles == 0) {
      units = MakeUnits(ranges[2 * block / T::kGroupTiles], unit, inverse);
    }
    if (block == 0) {
#pragma unroll
      for (int i = 0; i < 8; ++i) target[i / 4][i % 4] = y[i / 4][i % 4];
    } else if (block == 1) {
      AddBlock<T>(errors, feedback, 0, block, y[2], y[3], target);
    } else {
      AddBlock<T>(errors, feedback, block - 1, block, next_target[0], next_target[1], target);
    }
    // What the next block gets from all blocks but this one is made meanwhile.
    if (block > 0 && block + 1 < kBlocks) {
      const int n = 2 * block + 2;
      AddBlock<T>(errors, feedback, 0, block + 1, y[n], y[n + 1], next_target);
#pragma unroll
      for (int from = 1; from < block; ++from) {
        AddBlock<T>(errors, feedback, from, block + 1, next_target[0], next_target[1], next_target);
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int n = 2 * block + half;
      float error[4], level[4];
      RoundTile<kOneGroup>(target[half], y[n], constants + 256 * half, units, error, level);
#pragma unroll
      for (int a = 0; a < 2; ++a) {
        errors[block][2 * half + a] = PackErrors<kCareful>(error[2 * a], error[2 * a + 1]);
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int i = 2 * a + e;
          sums[a][e] = fmaf(level[i], 3.0f * (1 << (2 * (n % 8))), n % 8 == 0 ? kBase : sums[a][e]);
          cross[a] = fmaf(fmaf(y[n][i], both_units[a], units.low[a]), error[i], cross[a]);
        }
      }
      if (n % 8 == 7) {
#pragma unroll
        for (int a = 0; a < 2; ++a) {
          words[2 * (n / 8) + a] =
              __byte_perm(__float_as_uint(sums[a][0]), __float_as_uint(sums[a][1]), 0x5410);
        }
      }
      if (half == 0) AddTile<kCareful>(error, errors[block], constants + 512, target[1]);
    }
  }
  return InnerProductRatio(own, JoinOwnRow(cross, [](float x, float y) { return x + y; }) * unit);
}

// The same. exact: y is the scalar definition's, so that ties are, too.
template <class T>
__device__ __forceinline__ float RoundWithFeedback(float (&y)[T::kTiles][4], const RowFacts& facts,
                                                   const RowRange (&ranges)[T::kGroups], bool exact,
                                                   const char* feedback,
                                                   uint32_t (&words)[T::kTiles / 4]) {
  float unit = ranges[0].range, far = fabsf(ranges[0].low);
#pragma unroll
  for (int g = 1; g < T::kGroups; ++g) {
    unit = fmaxf(unit, ranges[g].range);
    far = fmaxf(far, fabsf(ranges[g].low));
  }
  exact |= far > 8.0f * unit;
  exact |= facts.Peak() > fminf(kErrorMax * unit, kFeedbackMagnitudeMax);
  if (__any_sync(~0u, exact)) return RoundInUnits<T, true>(y, facts, ranges, unit, feedback, words);
  return RoundInUnits<T, false>(y, facts, ranges, unit, feedback, words);
}

}  // namespace crumb::kernels::cuda
