// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_fp16.h>

#include <cfloat>
#include <cstdint>

#include "kernels/cuda/evict_constants.h"
#include "kernels/cuda/ptx.cuh"
#include "kernels/cuda/quantize_rows.cuh"
#include "kernels/quantize.h"

// The method `crumb` on 16 rows of a warp: rounding that passes each channel's error on to the
// channels behind it, and a scale that keeps a row's inner product with itself. Blocks of 16
// channels follow each other: what earlier blocks add comes from the tensor cores, then one thread
// per row walks through the block. One warp walks for two, a row a lane.
namespace crumb::kernels::cuda {

// Beyond it a row's scale and minimum are saturated anyway; up to it no product overflows.
inline constexpr float kFeedbackMagnitudeMax = 0x1p56f;
inline constexpr float kInnerProductRatioMax = 2.0f;

// Shared memory of one warp.
template <class T>
struct alignas(128) FeedbackScratch {
  static constexpr int kBlocks = T::kDim / kFeedbackChannels;
  // Of the blocks' own floats in the constants.
  static constexpr int kOwnOffset = FeedbackPairs(T::kDim) * kFeedbackPairBytes;
  // Row strides are odd multiples of 16 bytes, for loads by 8 lanes of 8 rows.
  float y[16][T::kDim + 4];  // a block's errors, halves, take its place once it is done
  float added[16][kFeedbackChannels + 4];
  float2 range[T::kGroups][16];  // low, range
  uint32_t meta[T::kGroups][16];
  uint32_t words[16][T::kDim / 16 + 1];
  float ratio[16];
  uint32_t large;  // whether errors may be more than a half holds
};

// Beyond it a value's error, in units of its range, may be more than a half holds.
inline constexpr float kErrorMax = 32768.0f;

// One thread's row, in units of the range of each group: 0 is the least value, 1 the most.
struct RowSums {
  float own = 0.0f;    // <y, y>
  float cross = 0.0f;  // <y, y - z>
};

// A operand of the products: the errors of block `block`, 16 rows x 16 channels.
template <class T>
__device__ __forceinline__ void LoadErrors(const FeedbackScratch<T>& s, int block,
                                           uint32_t (&a)[4]) {
  const int lane = threadIdx.x % 32;
  ptx::LoadMatrices(
      a, ptx::SharedAddress(&s.y[lane % 16][kFeedbackChannels * block]) + 16 * (lane / 16));
}

// sums += errors of blocks `from` to from + kCount - 1 times U_{from, to} and so on, for both
// warps' rows. What it loads is asked for first.
template <class T, int kCount>
__device__ __forceinline__ void AddBlocks(const FeedbackScratch<T>* pair, const char* feedback,
                                          int from, int to, float (&sums)[2][2][4]) {
  uint4 u[kCount];
  uint32_t a[kCount][2][4];
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    u[i] = reinterpret_cast<const uint4*>(feedback + (to * (to - 1) / 2 + from + i) *
                                                         kFeedbackPairBytes)[threadIdx.x % 32];
#pragma unroll
    for (int h = 0; h < 2; ++h) LoadErrors<T>(pair[h], from + i, a[i][h]);
  }
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const uint32_t(&e)[4] = a[i][h];
      ptx::MmaF16(sums[h][0], e[0], e[1], e[2], e[3], u[i].x, u[i].y);
      ptx::MmaF16(sums[h][1], e[0], e[1], e[2], e[3], u[i].z, u[i].w);
    }
  }
}

// Two errors, limited to what a half holds.
__device__ __forceinline__ uint32_t LimitErrors(uint32_t packed) {
  const __half2 limit = __float2half2_rn(65504.0f);
  const __half2 limited =
      __hmax2(__hmin2(reinterpret_cast<const __half2&>(packed), limit), __hneg2(limit));
  return reinterpret_cast<const uint32_t&>(limited);
}

// Channels of one block, one after the other. y, added: of this thread's row; own: U of the block,
// [16][16] floats, the same for all rows; unit: of `added` and of the errors that go out. codes[c]:
// channels 2 c, 2 c + 1, 2 c + 8, 2 c + 9 in bits 0, 16, 2 and 18.
template <bool kOneGroup>
__device__ __forceinline__ void RoundBlock(const float (&y)[16], const float (&added)[16],
                                           const float* own, float low, float range, float unit,
                                           bool large, RowSums* sums, uint32_t (&codes)[4],
                                           uint32_t (&errors)[8]) {
  constexpr float kMagic = 12582912.0f;  // 1.5 * 2^23: whole numbers are its low bits
  constexpr uint32_t kMagicBits = 0x4b400000u;
  const float inverse = __fdividef(1.0f, range);
  const float factor = kOneGroup ? 1.0f : unit * inverse;
  float place[16], target[16], error[16], cross = 0.0f;
#pragma unroll
  for (int j = 0; j < 16; ++j) {
    place[j] = (y[j] - low) * inverse;
    target[j] = kOneGroup ? added[j] + place[j] : fmaf(added[j], factor, place[j]);
  }
#pragma unroll
  for (int c = 0; c < 4; ++c) codes[c] = 0u - kMagicBits * 0x50005u;
#pragma unroll
  for (int j = 0; j < 16; ++j) {
    const float rounded = fmaf(__saturatef(target[j]), 3.0f, kMagic);
    const float code = rounded - kMagic;
    error[j] = fmaf(code, -1.0f / 3.0f, place[j]);
#pragma unroll
    for (int later = (j + 1) / 4 * 4; later < 16; later += 4) {
      const float4 u = *reinterpret_cast<const float4*>(own + 16 * j + later);
      if (later > j) target[later] = fmaf(error[j], u.x, target[later]);
      if (later + 1 > j) target[later + 1] = fmaf(error[j], u.y, target[later + 1]);
      if (later + 2 > j) target[later + 2] = fmaf(error[j], u.z, target[later + 2]);
      if (later + 3 > j) target[later + 3] = fmaf(error[j], u.w, target[later + 3]);
    }
    codes[j % 8 / 2] += __float_as_uint(rounded) << (2 * (j / 8) + 16 * (j % 2));
    sums->own = fmaf(y[j], y[j], sums->own);
    cross = fmaf(y[j], error[j], cross);
  }
  sums->cross = fmaf(cross, range, sums->cross);
  const float out = kOneGroup ? 1.0f : __fdividef(range, unit);
#pragma unroll
  for (int j = 0; j < 16; j += 2) {
    errors[j / 2] = kOneGroup ? ptx::PackHalf(error[j], error[j + 1])
                              : ptx::PackHalf(error[j] * out, error[j + 1] * out);
  }
  if (!large) return;
#pragma unroll
  for (int i = 0; i < 8; ++i) errors[i] = LimitErrors(errors[i]);
}

// All blocks of the 32 rows whose y and ranges lie in `pair`, a row a lane; codes go to `words`.
// Returns the sums of this lane's row.
template <class T>
__device__ __forceinline__ RowSums RoundBlocks(FeedbackScratch<T>* pair, const char* feedback) {
  const int lane = threadIdx.x % 32, row = lane % 16;
  FeedbackScratch<T>& mine = pair[lane / 16];
  const bool large = (pair[0].large | pair[1].large) != 0;
  float unit = mine.range[0][row].y;
#pragma unroll
  for (int g = 1; g < T::kGroups; ++g) unit = fmaxf(unit, mine.range[g][row].y);
  RowSums sums;
  uint32_t words[4] = {0, 0, 0, 0};  // of 64 channels
  float products[2][2][4] = {};
#pragma unroll 1
  for (int block = 0; block < FeedbackScratch<T>::kBlocks; ++block) {
    if (block > 0) AddBlocks<T, 1>(pair, feedback, block - 1, block, products);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
      for (int n = 0; n < 2; ++n) {
#pragma unroll
        for (int a = 0; a < 2; ++a) {
          *reinterpret_cast<float2*>(&pair[h].added[lane / 4 + 8 * a][8 * n + lane % 4 * 2]) =
              make_float2(products[h][n][2 * a], products[h][n][2 * a + 1]);
          products[h][n][2 * a] = products[h][n][2 * a + 1] = 0.0f;
        }
      }
    }
    __syncwarp();
    float y[16], added[16];
#pragma unroll
    for (int j = 0; j < 16; j += 4) {
      *reinterpret_cast<float4*>(y + j) =
          *reinterpret_cast<const float4*>(&mine.y[row][kFeedbackChannels * block + j]);
      *reinterpret_cast<float4*>(added + j) = *reinterpret_cast<const float4*>(&mine.added[row][j]);
    }
    // What the next block gets from all blocks but this one is made meanwhile.
    if (block + 1 < FeedbackScratch<T>::kBlocks) {
      int from = block % 2;
      if (from == 1) AddBlocks<T, 1>(pair, feedback, 0, block + 1, products);
#pragma unroll 1
      for (; from < block; from += 2) {
        AddBlocks<T, 2>(pair, feedback, from, block + 1, products);
      }
    }
    const float2 range = mine.range[kFeedbackChannels * block / (T::kDim / T::kGroups)][row];
    uint32_t codes[4], errors[8];
    RoundBlock<T::kGroups == 1>(
        y, added,
        reinterpret_cast<const float*>(feedback + FeedbackScratch<T>::kOwnOffset +
                                       block * kFeedbackOwnBytes),
        range.x, range.y, unit, large, &sums, codes, errors);
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      words[c] = (block % 4 == 0 ? 0u : words[c]) | codes[c] << (4 * (block % 4));
    }
    __syncwarp();
    uint4* to = reinterpret_cast<uint4*>(&mine.y[row][kFeedbackChannels * block]);
    to[0] = make_uint4(errors[0], errors[1], errors[2], errors[3]);
    to[1] = make_uint4(errors[4], errors[5], errors[6], errors[7]);
    if (block % 4 == 3) {
#pragma unroll
      for (int c = 0; c < 4; ++c) mine.words[row][block / 4 * 4 + c] = words[c];
    }
    __syncwarp();
  }
  return sums;
}

// Brings y and the ranges under the rows' thresholds into `s`.
template <class T>
__device__ __forceinline__ void PlaceRows(const float (&y)[T::kTiles][4], const RowFacts& facts,
                                          FeedbackScratch<T>& s) {
  const int lane = threadIdx.x % 32;
  bool large = false;
#pragma unroll
  for (int g = 0; g < T::kGroups; ++g) {
    const RowRange range = FindRange<T>(y, facts, g);
#pragma unroll
    for (int a = 0; a < 2; ++a) {
      large |= facts.Peak(a) > kErrorMax * range.range[a];
      if (lane % 4 == 0) s.range[g][lane / 4 + 8 * a] = make_float2(range.low[a], range.range[a]);
    }
  }
  large = __any_sync(~0u, large);
  if (lane == 0) s.large = large;
#pragma unroll
  for (int n = 0; n < T::kTiles; ++n) {
#pragma unroll
    for (int a = 0; a < 2; ++a) {
      *reinterpret_cast<float2*>(&s.y[lane / 4 + 8 * a][8 * n + lane % 4 * 2]) =
          make_float2(y[n][2 * a], y[n][2 * a + 1]);
    }
  }
  __syncwarp();
}

// a = <y, y> / <y, z> within [1/2, 2]; 1 where <y, z> is not above 0.
__device__ __forceinline__ float InnerProductRatio(const RowSums& sums) {
  const float product = sums.own - sums.cross;
  if (!(product > 0.0f)) return 1.0f;
  return fminf(fmaxf(__fdiv_rn(sums.own, product), 1.0f / kInnerProductRatioMax),
               kInnerProductRatioMax);
}

// First part: limits y and brings it into `s`. cut: rows (bit 0 to 15) that go without clip.
template <class T>
__device__ __forceinline__ void BeginFeedback(float (&y)[T::kTiles][4], RowFacts& facts,
                                              uint32_t cut, FeedbackScratch<T>& s) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int a = 0; a < 2; ++a) {
    if ((cut >> (lane / 4 + 8 * a) & 1) != 0) {
      facts.threshold[a] = kFeedbackMagnitudeMax;
    }
    facts.threshold[a] = facts.finite[a] ? fminf(facts.threshold[a], kFeedbackMagnitudeMax) : 0.0f;
  }
  bool large = false;
#pragma unroll
  for (int a = 0; a < 2; ++a) {
    large |= facts.Peak(a) > kFeedbackMagnitudeMax;
  }
  if (__any_sync(~0u, large)) {
#pragma unroll
    for (int n = 0; n < T::kTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        y[n][i] = fminf(fmaxf(y[n][i], -kFeedbackMagnitudeMax), kFeedbackMagnitudeMax);
      }
    }
  }
  PlaceRows<T>(y, facts, s);
}

// Second part, by one warp for the two of `pair`: codes and ratios.
template <class T>
__device__ __forceinline__ void RoundWithFeedback(FeedbackScratch<T>* pair, const char* feedback) {
  const int lane = threadIdx.x % 32;
  pair[lane / 16].ratio[lane % 16] = InnerProductRatio(RoundBlocks<T>(pair, feedback));
}

// Third part: same outputs as RoundRows. finite: of rows r and r + 8.
template <class T>
__device__ __forceinline__ uint32_t EndFeedback(const bool (&finite)[2], FeedbackScratch<T>& s,
                                                uint32_t (&words)[T::kTiles / 4],
                                                uint32_t (&meta)[T::kGroups][2]) {
  const int lane = threadIdx.x % 32, row = lane % 16;
  const float ratio = s.ratio[row];
  uint32_t status = 0;
#pragma unroll
  for (int g = 0; g < T::kGroups; ++g) {
    const float2 range = s.range[g][row];
    bool saturated = false;
    const uint32_t bits =
        HalfBits(ratio * Third(range.y), &saturated) | HalfBits(ratio * range.x, &saturated) << 16;
    if (lane < 16) s.meta[g][row] = bits;
    if (saturated) status |= kStatusSaturated;
  }
  __syncwarp();
#pragma unroll
  for (int a = 0; a < 2; ++a) {
#pragma unroll
    for (int p = 0; p < T::kTiles / 8; ++p) {
      words[2 * p + a] = s.words[lane / 4 + 8 * a][4 * p + lane % 4];
    }
#pragma unroll
    for (int g = 0; g < T::kGroups; ++g) {
      meta[g][a] = finite[a] ? s.meta[g][lane / 4 + 8 * a] : 0;
    }
    if (!finite[a]) status |= kStatusNonFinite;
  }
  __syncwarp();
  return status;
}

}  // namespace crumb::kernels::cuda
