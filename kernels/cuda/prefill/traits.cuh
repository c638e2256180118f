// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "kernels/cuda/common/code_pairs.cuh"
#include "kernels/cuda/common/ptx.cuh"
#include "kernels/cuda/common/window_tokens.cuh"
#include "kernels/cuda/prefill/prefill_attention.h"

// Sizes, shared memory and the running softmax of prefill attention. Query rows (a fresh token with
// one query head) are the columns of every product, tokens and channels their rows, so tiles go to
// the tensor cores by masking and the softmax of a column stays in one warp.
namespace crumb::kernels::cuda::prefill {

inline constexpr float kLog2E = 1.4426950408889634f;
inline constexpr float kLn2 = 0.6931471805599453f;
// A maximum is followed only when it grows by more than this many powers of two.
inline constexpr float kLag = 4.0f;

template <int dim, int groups, int column_tiles>
struct Traits {
  static constexpr int kDim = dim;
  static constexpr int kGroups = groups;             // quantization groups of a row
  static constexpr int kColumnTiles = column_tiles;  // of 8 columns a warp
  static constexpr int kTokens = 64;
  static constexpr int kWarps = 4;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kColumns = 8 * column_tiles;  // query rows of a warp
  static constexpr int kBlockColumns = kWarps * kColumns;
  static constexpr int kLaneColumns = 2 * column_tiles;  // columns 8 n + 2 c + e, element 2 n + e
  static constexpr int kSteps = dim / 16;
  static constexpr int kWords = dim / 32;  // code words of a lane and 16 tokens
  static constexpr int kWide = kWords < 4 ? 2 : 4;
  static constexpr int kStepsPerGroup = kSteps / groups;
  static constexpr int kCodeBytes = kTokens * dim / 4;
  static constexpr int kMetaBytes = kTokens * groups * 4;
  static constexpr int kTileBytes = 2 * (kCodeBytes + kMetaBytes);
  static constexpr int kStages = dim == 256 ? 4 : 6;  // tiles in shared memory
  static constexpr int kLead = kStages / 2;           // of them asked for ahead
  static constexpr int kRows = dim == 256 ? 16 : 32;  // BF16 tokens of a stage
  static constexpr int kRowBytes = 2 * dim + 16;      // padded against bank conflicts
  static constexpr int kRowStages = 3;
  static constexpr int kHoldPages = 16;  // between two times that sums are put away (HeldSums)
};

// Shared memory of a block.
template <class T>
struct Shared {
  // Query operands of each warp: [column tile][pair of steps][lane].
  uint4 query[T::kWarps][T::kColumnTiles][T::kSteps / 2][32];
  union {
    char tiles[T::kStages][T::kTileBytes];
    char rows[T::kRowStages][2][T::kRows][T::kRowBytes];  // K, V
  };
  // Of two columns and a group: where sums of products begin, minus 1.5 times the sum of the
  // rounded column, as integers behind kProductsMiddle's bits; and the sums of q', log2 units.
  float4 query_terms[T::kWarps][T::kGroups][T::kColumns / 2];
  // Of two columns: log2 units of a product's unit, and what takes the middle out of products.
  float4 query_unit[T::kWarps][T::kColumns / 2];
  float bias[T::kWarps][T::kColumns];  // of INT2 logits, log2 units
  // Of p, put away, and what all that is put away is to be multiplied with.
  float held_sum[T::kLaneColumns][T::kThreads];
  float held_factor[T::kLaneColumns][T::kThreads];
  int token[T::kWarps][T::kColumns];  // fresh token of the column
  int row[T::kWarps][T::kColumns];    // of q and out, negative: no such column
};

// What a block works on.
template <class T>
struct Block {
  int sequence, head;
  int heads;        // query heads of the KV head
  int first_token;  // fresh token of the first column
  int last_token;   // of the last one that exists
  int columns;      // that exist
  int sink, pages, fresh;
  int paged;   // tokens of BF16 pages
  int recent;  // those, and older BF16 tokens behind them
  int begin;   // row of the first fresh token in q
  float scale;

  __device__ __forceinline__ explicit Block(const PrefillAttentionParams& p)
      : sequence(blockIdx.z), head(blockIdx.y), heads(p.shape.q_heads / p.shape.kv_heads) {
    const PrefillLengths& l = p.lengths;
    fresh = l.fresh_tokens[sequence];
    // The last columns have most to do: they go first.
    const int64_t first = static_cast<int64_t>(gridDim.x - 1 - blockIdx.x) * T::kBlockColumns;
    columns = static_cast<int>(max(int64_t{0}, min(static_cast<int64_t>(fresh) * heads - first,
                                                   static_cast<int64_t>(T::kBlockColumns))));
    if (columns == 0) return;
    first_token = static_cast<int>(first / heads);
    last_token = static_cast<int>((first + columns - 1) / heads);
    first_column = first;
    sink = l.sink_tokens[sequence];
    pages = l.pages[sequence];
    paged = kPageRows * Bf16Pages(l, sequence);
    recent = paged + l.recent_tokens[sequence];
    begin = l.fresh_begin[sequence];
    scale = p.scale != 0.0f ? p.scale : rsqrtf(static_cast<float>(T::kDim));
  }

  int64_t first_column;

  __device__ __forceinline__ int before_fresh() const { return sink + T::kTokens * pages + recent; }
  // The first position that fresh token `token` attends.
  __device__ __forceinline__ int FirstPosition(const PrefillAttentionParams& p, int token) const {
    return p.window > 0 ? max(0, before_fresh() + token - p.window + 1) : 0;
  }
};

__device__ __forceinline__ float MaxOverRows(float x) {
#pragma unroll
  for (int step = 4; step < 32; step *= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, step));
  return x;
}
__device__ __forceinline__ float SumOverRows(float x) {
#pragma unroll
  for (int step = 4; step < 32; step *= 2) x += __shfl_xor_sync(~0u, x, step);
  return x;
}

__device__ __forceinline__ int SumOverRows(int x) {
#pragma unroll
  for (int step = 4; step < 32; step *= 2) x += __shfl_xor_sync(~0u, x, step);
  return x;
}

__device__ __forceinline__ float SoftCap(float logit, float cap) {
  return cap * tanhf(logit / cap);
}

// Running softmax of a lane's columns. Accumulator element 2 a + e of (column tile n, channel tile
// m) is channel 16 m + 8 a + r of column 8 n + 2 c + e.
template <class T>
struct State {
  float out[T::kColumnTiles][T::kSteps][4];
  float sum[T::kLaneColumns];        // of p, this lane's tokens
  float reference[T::kLaneColumns];  // p = 2^(logit - reference)
  uint32_t seen;                     // columns whose reference means something
  float headroom;                    // p reaches 2^headroom at the maximum: fills fp16's range
  uint32_t scale_bound;              // fp16 bits of the largest v_scale headroom was made for

  __device__ __forceinline__ void Clear() {
#pragma unroll
    for (int n = 0; n < T::kColumnTiles; ++n) {
#pragma unroll
      for (int m = 0; m < T::kSteps; ++m) {
#pragma unroll
        for (int i = 0; i < 4; ++i) out[n][m][i] = 0.0f;
      }
    }
#pragma unroll
    for (int i = 0; i < T::kLaneColumns; ++i) sum[i] = reference[i] = 0.0f;
    seen = 0;
    headroom = 0.0f;
    scale_bound = 0;
  }

  // Whether MustMove has to be asked about logits `t` minus references. As integers positive ones
  // compare as they do, and others are below them.
  __device__ __forceinline__ bool MayMove(const float (&t)[2][T::kColumnTiles][4]) const {
    int most[4] = {};  // chains of their own
#pragma unroll
    for (int v = 0; v < 2; ++v) {
#pragma unroll
      for (int n = 0; n < T::kColumnTiles; ++n) {
        int& x = most[n % 2 * 2];
        int& y = most[n % 2 * 2 + 1];
        x = __vimax3_s32(x, __float_as_int(t[v][n][0]), __float_as_int(t[v][n][1]));
        y = __vimax3_s32(y, __float_as_int(t[v][n][2]), __float_as_int(t[v][n][3]));
      }
    }
    const int all = max(max(most[0], most[1]), max(most[2], most[3]));
    return all > __float_as_int(headroom + kLag) || seen != (1u << T::kLaneColumns) - 1;
  }

  // `best`: largest logits of this lane minus reference.
  __device__ __forceinline__ bool MustMove(const float (&best)[T::kLaneColumns]) const {
    bool moves = false;
#pragma unroll
    for (int i = 0; i < T::kLaneColumns; ++i) moves |= best[i] > headroom + kLag;
    if (seen != (1u << T::kLaneColumns) - 1) {
#pragma unroll
      for (int i = 0; i < T::kLaneColumns; ++i) {
        moves |= (seen >> i & 1) == 0 && best[i] > -INFINITY;
      }
    }
    return moves;
  }

  // Makes room for larger logits and value scales. moved[i]: what the reference of column i grew
  // by; factor[i]: what sums beside this state are to be multiplied with.
  __device__ __forceinline__ void Move(const float (&best)[T::kLaneColumns], uint32_t scale_most,
                                       float (&moved)[T::kLaneColumns],
                                       float (&factor)[T::kLaneColumns]) {
    const float old_headroom = headroom;
    for (int step = 4; step < 32; step *= 2) {
      scale_most = max(scale_most, __shfl_xor_sync(~0u, scale_most, step));
    }
    if (scale_most > scale_bound) {
      // The bound is the power of two above: p * v_scale stays under 2^(10 + kLag).
      headroom = 9.0f - ilogbf(fmaxf(ptx::LowHalf(scale_most), 0x1p-24f));
      scale_bound = scale_most;
    }
#pragma unroll
    for (int i = 0; i < T::kLaneColumns; ++i) {
      const bool known = seen >> i & 1;
      float maximum = MaxOverRows(best[i]);
      if (known) maximum = fmaxf(maximum, old_headroom);
      if (maximum > -INFINITY) seen |= 1u << i;
      moved[i] = maximum > -INFINITY ? maximum - headroom : 0.0f;
      factor[i] = known ? ptx::Exp2(-moved[i]) : 1.0f;
      reference[i] += moved[i];
      sum[i] *= factor[i];
#pragma unroll
      for (int m = 0; m < T::kSteps; ++m) {
        out[i / 2][m][i % 2] *= factor[i];
        out[i / 2][m][2 + i % 2] *= factor[i];
      }
    }
  }
};

}  // namespace crumb::kernels::cuda::prefill
