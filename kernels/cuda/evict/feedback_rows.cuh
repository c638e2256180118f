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

// Rounding of the method `crumb` for the 16 rows of a warp. Each channel's rounding error is
// propagated to later channels through U, and scale and minimum are multiplied by a ratio that
// keeps the row's inner product with itself, in the metric (I + U) D (I + U)' if there is one.
//
// Rows stay in the MMA accumulators: a lane holds two of every eight channels of rows r and r + 8.
// Contributions of earlier blocks of 16 channels are MMAs that accumulate onto y. Within eight
// channels the four lanes of a row proceed one after the other.
namespace crumb::kernels::cuda {

// Bound on magnitudes. A row with larger ones saturates its scale or minimum anyway; up to it no
// multiplication overflows.
inline constexpr float kFeedbackMagnitudeMax = 0x1p56f;
inline constexpr float kInnerProductRatioMax = 2.0f;
// Bound on a row's magnitudes in units of its range. Beyond it an error may not fit a half.
inline constexpr float kErrorMax = 16384.0f;

// Packs two errors as halves. kCareful: limits them to the range of a half.
template <bool kCareful>
__device__ __forceinline__ uint32_t PackErrors(float one, float other) {
  const uint32_t packed = ptx::PackHalf(one, other);
  if (!kCareful) return packed;
  const __half2 limit = __float2half2_rn(65504.0f);
  const __half2 limited =
      __hmax2(__hmin2(reinterpret_cast<const __half2&>(packed), limit), __hneg2(limit));
  return reinterpret_cast<const uint32_t&>(limited);
}

// The units for rounding a group of rows r and r + 8. The unit is the range of the row's widest
// group.
struct RoundUnits {
  float low[2];     // low / unit
  float factor[2];  // 3 * unit / range
  float whole[2];   // range / unit
};

// Returns the units of a group. `inverse` is 1 / unit; all arguments are those of the lane's own
// row.
__device__ __forceinline__ RoundUnits MakeUnits(const RowRange& range, float unit, float inverse) {
  RoundUnits units;
  GetBothRows(range.low * inverse, units.low);
  GetBothRows(3.0f * unit * ptx::Reciprocal(range.range), units.factor);
  GetBothRows(range.range * inverse, units.whole);
  return units;
}

// Rounds eight channels. `target` is y plus the contributions of earlier channels, `place` is y;
// both are in units above the group's low. `own` are the tile's constants of U. Sets level[i] to
// code / 3 or the float below it, and error[i].
template <bool kOneGroup>
__device__ __forceinline__ void RoundTile(float (&target)[4], const float (&place)[4],
                                          const char* own, const RoundUnits& units,
                                          float (&error)[4], float (&level)[4]) {
  // A whole number on top of 1.5 * 2^23 is the float's low bits. Multiplied by the float below 1 /
  // 3, minus the same multiple of 1.5 * 2^23, it is exact, so one operation subtracts, divides and
  // clamps.
  constexpr float kMagic = 12582912.0f, kThird = 0x1.555554p-2f, kMagicThird = 4194303.75f;
  const char* mine = own + ptx::Lane() % 4 * 16;
  const float next = *reinterpret_cast<const float*>(mine + 192);
  const auto round = [&](int i, float reached) {
    const float whole = fmaf(reached, kOneGroup ? 3.0f : units.factor[i / 2], kMagic);
    level[i] = __saturatef(fmaf(whole, kThird, -kMagicThird));
    error[i] = kOneGroup ? place[i] - level[i] : fmaf(level[i], -units.whole[i / 2], place[i]);
  };
#pragma unroll
  for (int step = 0; step < 4; ++step) {
    // In each step every lane rounds both of its channels. A lane's result is final from its own
    // step on, when its errors are sent to the other lanes.
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
      round(i, target[i]);
      round(i + 1, fmaf(error[i], next, target[i + 1]));
    }
    if (step == 3) break;
    const float4 u = *reinterpret_cast<const float4*>(mine + 64 * step);
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
      const float first = __shfl_sync(~0u, error[i], step, 4);
      const float second = __shfl_sync(~0u, error[i + 1], step, 4);
      target[i] = fmaf(second, u.z, fmaf(first, u.x, target[i]));
      target[i + 1] = fmaf(second, u.w, fmaf(first, u.y, target[i + 1]));
    }
  }
}

// Computes sums = (first, second) + errors of block `from` times U between `from` and `to`.
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

// Adds the errors of a block's first eight channels times U of its other eight. Both factors are
// split into two halves for precision. `errors` holds the high halves of rows r and r + 8; the low
// halves are written behind them.
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

// Returns <y, y> / <y, z> clamped to [1/2, 2], or 1 if <y, z> is not positive. `own` is <y, y>,
// `cross` is <y, y - z>, in any metric.
__device__ __forceinline__ float InnerProductRatio(float own, float cross) {
  const float product = own - cross;
  if (!(product > 0.0f)) return 1.0f;
  return fminf(fmaxf(__fdividef(own, product), 1.0f / kInnerProductRatioMax),
               kInnerProductRatioMax);
}

// Replaces y by (y - low) in units. `inverse` is 1 / unit of the lane's own row, or 0 if the row is
// not finite: y then becomes zeros or NaN, whose codes are zero. kCareful: values may exceed their
// limits, or low may be many units from zero; returns <y, y> of the lane's own row after limiting.
template <class T, bool kCareful>
__device__ __forceinline__ float PlaceRows(float (&y)[T::kTiles][4],
                                           const RowRange (&ranges)[T::kGroups], float inverse) {
  float own[2] = {}, inverses[2], low[2], offset[2];
  GetBothRows(inverse, inverses);
#pragma unroll
  for (int n = 0; n < T::kTiles; ++n) {
    if (n % T::kGroupTiles == 0) {
      GetBothRows(ranges[n / T::kGroupTiles].low, low);
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
  return kCareful ? ReduceOwnRow(own, [](float x, float y) { return x + y; }) : 0.0f;
}

// Returns the ratio of the lane's own row in the metric (I + U) D (I + U)' of `feedback`, whose
// weights D are positive. With g = y (I + U) and rest = e (I + U) it is computed from the sums
// own = sum D g^2 and cross = sum D g rest. `rows` and `errors` hold the high halves of y and e in
// units, as the MMA's operand A. Halves suffice: their rounding errors change a ratio by about 1e-5
// of it.
template <class T>
__device__ __forceinline__ float MetricRatio(const uint32_t (&rows)[T::kTiles / 2][4],
                                             const uint32_t (&errors)[T::kTiles / 2][4],
                                             const char* feedback) {
  constexpr int kBlocks = T::kTiles / 2;
  float own[2] = {}, cross[2] = {};
  // The last block is first, because its rows and errors are not needed afterwards.
#pragma unroll
  for (int block = kBlocks - 1; block >= 0; --block) {
    const char* constants = feedback + kFeedbackOwnOffset<T::kDim> + block * kFeedbackOwnBytes;
    float g[2][4] = {}, rest[2][4] = {};
    // Without it ptxas loads U for all blocks at once and spills thousands of bytes.
    __syncwarp();
#pragma unroll
    for (int from = block; from >= 0; --from) {
      const char* part = from == block
                             ? constants + kFeedbackMetricOffset
                             : feedback + (block * (block - 1) / 2 + from) * kFeedbackPairBytes;
      const uint4 u = reinterpret_cast<const uint4*>(part)[ptx::Lane()];
      ptx::MmaF16(g[0], rows[from], u.x, u.y);
      ptx::MmaF16(g[1], rows[from], u.z, u.w);
      ptx::MmaF16(rest[0], errors[from], u.x, u.y);
      ptx::MmaF16(rest[1], errors[from], u.z, u.w);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float2 d = reinterpret_cast<const float2*>(constants + kFeedbackWeightsOffset +
                                                       32 * half)[ptx::Lane() % 4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float weighted = g[half][i] * (i % 2 == 0 ? d.x : d.y);
        own[i / 2] = fmaf(weighted, g[half][i], own[i / 2]);
        cross[i / 2] = fmaf(weighted, rest[half][i], cross[i / 2]);
      }
    }
  }
  const auto add = [](float one, float other) { return one + other; };
  const float all_own = ReduceOwnRow(own, add), all_cross = ReduceOwnRow(cross, add);
  return InnerProductRatio(all_own, all_cross);
}

// Rounds 16 rows to codes in the order of RoundRows. `unit` is that of the lane's own row.
// Overwrites y. Returns the ratio of the lane's own row.
template <class T, bool kCareful>
__device__ __forceinline__ float RoundInUnits(float (&y)[T::kTiles][4], const RowFacts& facts,
                                              const RowRange (&ranges)[T::kGroups], float unit,
                                              const char* feedback,
                                              uint32_t (&words)[T::kTiles / 4]) {
  constexpr bool kOneGroup = T::kGroups == 1;
  constexpr int kBlocks = T::kTiles / 2;
  // Codes times powers of 4 on top of this are the low bits of a float.
  constexpr float kBase = 8388608.0f;
  const float inverse = facts.finite ? ptx::Reciprocal(unit) : 0.0f;
  const float limited = PlaceRows<T, kCareful>(y, ranges, inverse);
  const float own = kCareful ? limited : facts.squares;
  float cross[2] = {};
  float sums[2][2];
  // High halves of errors and of y, in units.
  uint32_t errors[kBlocks][4], rows[kBlocks][4];
  // y plus the contributions of earlier channels, for this block and the next.
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
    // The contributions of all blocks but this one to the next block are computed meanwhile.
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
        const float one = y[n][2 * a] + units.low[a], other = y[n][2 * a + 1] + units.low[a];
        rows[block][2 * half + a] = PackErrors<kCareful>(one, other);
        cross[a] = fmaf(other, error[2 * a + 1], fmaf(one, error[2 * a], cross[a]));
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int i = 2 * a + e;
          sums[a][e] = fmaf(level[i], 3.0f * (1 << (2 * (n % 8))), n % 8 == 0 ? kBase : sums[a][e]);
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
  // The first weight is 0 if the metric is the identity.
  if (*reinterpret_cast<const float*>(feedback + kFeedbackOwnOffset<T::kDim> +
                                      kFeedbackWeightsOffset) > 0.0f) {
    return MetricRatio<T>(rows, errors, feedback);
  }
  const float all_cross = ReduceOwnRow(cross, [](float x, float y) { return x + y; });
  return InnerProductRatio(own, all_cross * unit * unit);
}

// RoundInUnits with the units of these ranges. It takes the careful form for a warp with a row that
// is far from zero or has values far outside its range, or if `exact`: y is then bit-identical to
// the scalar definition's, so ties are resolved alike.
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
