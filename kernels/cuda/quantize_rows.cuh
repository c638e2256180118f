// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_fp16.h>

#include <cstdint>

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

// The `rank`-th largest |y| of rows r (most[0]) and r + 8 (most[1]), exactly. Counts values above a
// guess, from where a normal distribution would have it, and narrows the bracket; the bracket is in
// the bits of floats, so it ends. quantile: of |y| / sigma, for the first guess. peak: the rows'
// largest |y|.
template <class T>
__device__ __forceinline__ void LargestMagnitudes(const float (&y)[T::kTiles][4], int rank,
                                                  float quantile, const float (&peak)[2],
                                                  float (&found)[2]) {
  float squares[2] = {0.0f, 0.0f};
#pragma unroll
  for (int n = 0; n < T::kTiles; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) squares[i / 2] = fmaf(y[n][i], y[n][i], squares[i / 2]);
  }
  int low[2], high[2], low_count[2], high_count[2], guess[2];
  bool done[2];
#pragma unroll
  for (int a = 0; a < 2; ++a) {
    low[a] = 0;
    low_count[a] = T::kDim;
    high[a] = __float_as_int(peak[a]) + 1;
    high_count[a] = 0;
    done[a] = false;
    const float sigma = sqrtf(SumOverChannels(squares[a]) / T::kDim);
    guess[a] = __float_as_int(sigma * quantile);
  }
  for (int round = 0; round < 40; ++round) {
    int count[2] = {0, 0};
    float bound[2];
#pragma unroll
    for (int a = 0; a < 2; ++a) {
      guess[a] = min(max(guess[a], low[a] + 1), high[a] - 1);
      bound[a] = __int_as_float(guess[a]);
    }
#pragma unroll
    for (int n = 0; n < T::kTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) count[i / 2] += fabsf(y[n][i]) >= bound[i / 2] ? 1 : 0;
    }
#pragma unroll
    for (int a = 0; a < 2; ++a) {
      count[a] = SumOverChannels(count[a]);
      if (done[a]) continue;
      if (count[a] >= rank) {
        low[a] = guess[a];
        low_count[a] = count[a];
      } else {
        high[a] = guess[a];
        high_count[a] = count[a];
      }
      done[a] = low_count[a] == rank || high[a] - low[a] <= 1;
      // Interpolated on the values at first, halved in bits when that does not settle it.
      if (round < 6 && low[a] > 0) {
        const float part = (low_count[a] - rank + 0.5f) / (low_count[a] - high_count[a]);
        const float from = __int_as_float(low[a]), to = __int_as_float(high[a]);
        guess[a] = __float_as_int(from + part * (to - from));
      } else if (round < 6) {
        guess[a] = __float_as_int(0.7f * __int_as_float(guess[a]));
      } else {
        guess[a] = low[a] + (high[a] - low[a]) / 2;
      }
    }
    if (__all_sync(~0u, done[0] && done[1])) break;
  }
  // The least value from the bracket on; at equal values the bracket's end itself.
#pragma unroll
  for (int a = 0; a < 2; ++a) found[a] = INFINITY;
#pragma unroll
  for (int n = 0; n < T::kTiles; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float magnitude = fabsf(y[n][i]);
      if (__float_as_int(magnitude) >= low[i / 2]) found[i / 2] = fminf(found[i / 2], magnitude);
    }
  }
#pragma unroll
  for (int a = 0; a < 2; ++a) found[a] = MinOverChannels(found[a]);
}

// The least y - lo whose code is at least `code` (1..3) by the scalar definition, which truncates
// (y - lo) / scale + 1/2 with every operation rounded. That never falls as y grows, so codes need
// comparisons only; the bound lies within 3 floats of the unrounded one.
__device__ __forceinline__ float CodeThreshold(int code, float scale) {
  constexpr int kReach = 4;
  const int center = __float_as_int(__fmul_rn(scale, static_cast<float>(code) - 0.5f));
  int below = 0;
#pragma unroll
  for (int i = -kReach; i < kReach; ++i) {
    const float steps = __fadd_rn(__fdiv_rn(__int_as_float(center + i), scale), 0.5f);
    below += steps < static_cast<float>(code) ? 1 : 0;
  }
  return __int_as_float(center - kReach + below);
}

// fp16, nearest even, limited to +-65504.
__device__ __forceinline__ uint32_t HalfBits(float x, bool* saturated) {
  if (fabsf(x) >= 65520.0f) {
    *saturated = true;
    return x < 0.0f ? 0xfbffu : 0x7bffu;
  }
  return __half_as_ushort(__float2half_rn(x));
}

// Codes and metadata of 16 rows. words[2 p + a]: the word of channels 64 p .. 64 p + 63, row r + 8
// a, in K's order. meta[y][a]: valid in every lane of the row. Returns status bits of the lane's
// rows.
template <class T>
__device__ __forceinline__ uint32_t QuantizeRows(const float (&y)[T::kTiles][4], float clip,
                                                 float quantile, uint32_t (&words)[T::kTiles / 4],
                                                 uint32_t (&meta)[T::kGroups][2]) {
  float peak[2] = {0.0f, 0.0f}, poison[2] = {0.0f, 0.0f};
#pragma unroll
  for (int n = 0; n < T::kTiles; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      peak[i / 2] = fmaxf(peak[i / 2], fabsf(y[n][i]));
      poison[i / 2] = fmaf(y[n][i], 0.0f, poison[i / 2]);  // NaN as soon as one is not finite
    }
  }
  bool finite[2];
#pragma unroll
  for (int a = 0; a < 2; ++a) {
    peak[a] = MaxOverChannels(peak[a]);
    finite[a] = SumOverChannels(poison[a]) == 0.0f;
    if (!finite[a]) peak[a] = 0.0f;
  }
  float threshold[2] = {3.402823466e38f, 3.402823466e38f};
  if (clip > 0.0f) {
    const int index = min(static_cast<int>(clip * static_cast<float>(T::kDim)), T::kDim - 1);
    LargestMagnitudes<T>(y, T::kDim - index, quantile, peak, threshold);
  }
  uint32_t status = 0;
#pragma unroll
  for (int i = 0; i < T::kTiles / 4; ++i) words[i] = 0;
#pragma unroll
  for (int g = 0; g < T::kGroups; ++g) {
    float least[2], bound[2][3];
#pragma unroll
    for (int a = 0; a < 2; ++a) {
      float low = threshold[a], high = -threshold[a];
#pragma unroll
      for (int n = g * T::kGroupTiles; n < (g + 1) * T::kGroupTiles; ++n) {
        low = fminf(low, fminf(y[n][2 * a], y[n][2 * a + 1]));
        high = fmaxf(high, fmaxf(y[n][2 * a], y[n][2 * a + 1]));
      }
      low = fmaxf(MinOverChannels(low), -threshold[a]);
      high = fminf(MaxOverChannels(high), threshold[a]);
      const float range = fminf(fmaxf(__fsub_rn(high, low), 1e-8f), 3.402823466e38f);
      const float scale = __fdiv_rn(range, 3.0f);
      // The scalar definition negates the largest of 0 - y: its zero is negative.
      if (low == 0.0f) low = -0.0f;
      // Each of three lanes finds one threshold.
      const int lane = threadIdx.x % 32;
      const float mine = CodeThreshold(min(lane % 4 + 1, 3), scale);
      least[a] = low;
#pragma unroll
      for (int code = 0; code < 3; ++code) {
        bound[a][code] = __shfl_sync(~0u, mine, lane / 4 * 4 + code);
      }
      bool saturated = false;
      meta[g][a] = HalfBits(scale, &saturated) | HalfBits(low, &saturated) << 16;
      if (!finite[a]) {
        meta[g][a] = 0;
        status |= kStatusNonFinite;
#pragma unroll
        for (int code = 0; code < 3; ++code) bound[a][code] = NAN;
      } else if (saturated) {
        status |= kStatusSaturated;
      }
    }
#pragma unroll
    for (int n = g * T::kGroupTiles; n < (g + 1) * T::kGroupTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint32_t unit = 1u << (2 * (n % 8) + 16 * (i % 2));
        uint32_t& word = words[2 * (n / 8) + i / 2];
        const float above = __fsub_rn(y[n][i], least[i / 2]);
#pragma unroll
        for (int code = 0; code < 3; ++code) word += above >= bound[i / 2][code] ? unit : 0u;
      }
    }
  }
  return status;
}

}  // namespace crumb::kernels::cuda
