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
// per row walks through the block.
namespace crumb::kernels::cuda {

// Beyond it a row's scale and minimum are saturated anyway; up to it no product overflows.
inline constexpr float kFeedbackMagnitudeMax = 0x1p56f;
inline constexpr float kInnerProductRatioMax = 2.0f;

// Shared memory of one warp.
template <class T>
struct FeedbackScratch {
  static constexpr int kBlocks = T::kDim / kFeedbackChannels;
  // Of the blocks' own floats in the constants.
  static constexpr int kOwnOffset = FeedbackPairs(T::kDim) * kFeedbackPairBytes;
  // Row strides are odd multiples of 16 bytes, for loads by 8 lanes of 8 rows.
  float y[16][T::kDim + 4];  // a block's errors, halves, take its place once it is done
  float added[16][kFeedbackChannels + 4];
  float2 range[T::kGroups][16];  // low, range
  uint32_t meta[T::kGroups][16];
  uint32_t words[16][T::kDim / 16 + 1];
};

// One thread's row, in units of the range of each group: 0 is the least value, 1 the most.
struct RowSums {
  float own = 0.0f;      // <y, y>
  float product = 0.0f;  // <y, z>
};

// A operand of the products: the errors of block `block`, 16 rows x 16 channels.
template <class T>
__device__ __forceinline__ void LoadErrors(const FeedbackScratch<T>& s, int block,
                                           uint32_t (&a)[4]) {
  const int lane = threadIdx.x % 32;
  ptx::LoadMatrices(
      a, ptx::SharedAddress(&s.y[lane % 16][kFeedbackChannels * block]) + 16 * (lane / 16));
}

// sums += errors of block `from` times U_{from, to}.
template <class T>
__device__ __forceinline__ void AddBlock(const FeedbackScratch<T>& s, const char* feedback,
                                         int from, int to, float (&sums)[2][4]) {
  uint32_t a[4];
  LoadErrors<T>(s, from, a);
  const uint4 u = reinterpret_cast<const uint4*>(
      feedback + (to * (to - 1) / 2 + from) * kFeedbackPairBytes)[threadIdx.x % 32];
  ptx::MmaF16(sums[0], a[0], a[1], a[2], a[3], u.x, u.y);
  ptx::MmaF16(sums[1], a[0], a[1], a[2], a[3], u.z, u.w);
}

// Two errors as halves, limited to what a half holds.
__device__ __forceinline__ uint32_t PackErrors(float low, float high) {
  const uint32_t packed = ptx::PackHalf(low, high);
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
                                           RowSums* sums, uint32_t (&codes)[4],
                                           uint32_t (&errors)[8]) {
  constexpr float kMagic = 12582912.0f;  // 1.5 * 2^23: whole numbers are its low bits
  constexpr uint32_t kMagicBits = 0x4b400000u;
  const float inverse = __fdividef(1.0f, range), scale = range * (1.0f / 3.0f);
  const float factor = kOneGroup ? 1.0f : unit * inverse;
  float place[16], target[16], error[16];
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
    sums->product = fmaf(y[j], fmaf(code, scale, low), sums->product);
  }
  const float out = kOneGroup ? 1.0f : __fdividef(range, unit);
#pragma unroll
  for (int j = 0; j < 16; j += 2) {
    errors[j / 2] = kOneGroup ? PackErrors(error[j], error[j + 1])
                              : PackErrors(error[j] * out, error[j + 1] * out);
  }
}

// All blocks of 16 rows whose y and ranges lie in `s`; codes go to s.words. Lanes t and t + 16 do
// row t, lane t stores. Returns the sums of this lane's row.
template <class T>
__device__ __forceinline__ RowSums RoundBlocks(FeedbackScratch<T>& s, const char* feedback) {
  const int lane = threadIdx.x % 32, row = lane % 16;
  float unit = s.range[0][row].y;
#pragma unroll
  for (int g = 1; g < T::kGroups; ++g) unit = fmaxf(unit, s.range[g][row].y);
  RowSums sums;
  uint32_t words[4] = {0, 0, 0, 0};  // of 64 channels
  float products[2][4] = {};
#pragma unroll 1
  for (int block = 0; block < FeedbackScratch<T>::kBlocks; ++block) {
    if (block > 0) AddBlock<T>(s, feedback, block - 1, block, products);
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int a = 0; a < 2; ++a) {
        *reinterpret_cast<float2*>(&s.added[lane / 4 + 8 * a][8 * n + lane % 4 * 2]) =
            make_float2(products[n][2 * a], products[n][2 * a + 1]);
        products[n][2 * a] = products[n][2 * a + 1] = 0.0f;
      }
    }
    __syncwarp();
    float y[16], added[16];
#pragma unroll
    for (int j = 0; j < 16; j += 4) {
      *reinterpret_cast<float4*>(y + j) =
          *reinterpret_cast<const float4*>(&s.y[row][kFeedbackChannels * block + j]);
      *reinterpret_cast<float4*>(added + j) = *reinterpret_cast<const float4*>(&s.added[row][j]);
    }
    // What the next block gets from all blocks but this one is made meanwhile.
    if (block + 1 < FeedbackScratch<T>::kBlocks) {
      for (int from = 0; from < block; ++from) {
        AddBlock<T>(s, feedback, from, block + 1, products);
      }
    }
    const float2 range = s.range[kFeedbackChannels * block / (T::kDim / T::kGroups)][row];
    uint32_t codes[4], errors[8];
    RoundBlock<T::kGroups == 1>(
        y, added,
        reinterpret_cast<const float*>(feedback + FeedbackScratch<T>::kOwnOffset +
                                       block * kFeedbackOwnBytes),
        range.x, range.y, unit, &sums, codes, errors);
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      words[c] = (block % 4 == 0 ? 0u : words[c]) | codes[c] << (4 * (block % 4));
    }
    __syncwarp();
    if (lane < 16) {
      uint4* to = reinterpret_cast<uint4*>(&s.y[row][kFeedbackChannels * block]);
      to[0] = make_uint4(errors[0], errors[1], errors[2], errors[3]);
      to[1] = make_uint4(errors[4], errors[5], errors[6], errors[7]);
      if (block % 4 == 3) {
#pragma unroll
        for (int c = 0; c < 4; ++c) s.words[row][block / 4 * 4 + c] = words[c];
      }
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
#pragma unroll
  for (int g = 0; g < T::kGroups; ++g) {
    const RowRange range = FindRange<T>(y, facts, g);
    if (lane % 4 != 0) continue;
    s.range[g][lane / 4] = make_float2(range.low[0], range.range[0]);
    s.range[g][lane / 4 + 8] = make_float2(range.low[1], range.range[1]);
  }
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
  if (!(sums.product > 0.0f)) return 1.0f;
  return fminf(fmaxf(__fdiv_rn(sums.own, sums.product), 1.0f / kInnerProductRatioMax),
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
      facts.reaches_low[a] = facts.reaches_high[a] = false;
    }
    facts.threshold[a] = facts.finite[a] ? fminf(facts.threshold[a], kFeedbackMagnitudeMax) : 0.0f;
  }
  // The deviation of a row with such values is at least this.
  if (__any_sync(~0u, fmaxf(facts.sigma[0], facts.sigma[1]) > kFeedbackMagnitudeMax * 0x1p-8f)) {
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

// Second part: codes. Returns the row's ratio, in lanes t and t + 16 that of row t.
template <class T>
__device__ __forceinline__ float RoundWithFeedback(FeedbackScratch<T>& s, const char* feedback) {
  return InnerProductRatio(RoundBlocks<T>(s, feedback));
}

// Third part: same outputs as RoundRows. finite: of rows r and r + 8.
template <class T>
__device__ __forceinline__ uint32_t EndFeedback(const bool (&finite)[2], float ratio,
                                                FeedbackScratch<T>& s,
                                                uint32_t (&words)[T::kTiles / 4],
                                                uint32_t (&meta)[T::kGroups][2]) {
  const int lane = threadIdx.x % 32, row = lane % 16;
  uint32_t status = 0;
#pragma unroll
  for (int g = 0; g < T::kGroups; ++g) {
    const float2 range = s.range[g][row];
    bool saturated = false;
    const uint32_t bits = HalfBits(ratio * __fdiv_rn(range.y, 3.0f), &saturated) |
                          HalfBits(ratio * range.x, &saturated) << 16;
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
