// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "kernels/cuda/common/page_layout.cuh"
#include "kernels/cuda/common/ptx.cuh"
#include "kernels/cuda/prefill/prefill_attention.h"

// Sizes, shared memory and running softmax of prefill attention by mma.sync. A query row is a fresh
// token with one query head. Query rows are the columns of every MMA, tokens and channels its rows,
// so that tiles become operands by masking and the softmax of a query row stays in one warp.
namespace crumb::kernels::cuda::prefill {

inline constexpr float kLog2E = 1.4426950408889634f;
inline constexpr float kLn2 = 0.6931471805599453f;
// The running max is raised only when the maximum has grown by more than this many powers of two.
inline constexpr float kLag = 4.0f;

template <int dim, int groups, int query_tiles>
struct Traits {
  static constexpr int kDim = dim;
  static constexpr int kGroups = groups;           // quantization groups per row
  static constexpr int kQueryTiles = query_tiles;  // tiles of 8 query rows per warp
  static constexpr int kTokens = 64;
  static constexpr int kWarps = 4;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kQueryRows = 8 * query_tiles;  // query rows per warp
  static constexpr int kBlockQueryRows = kWarps * kQueryRows;
  static constexpr int kLaneQueryRows =
      2 * query_tiles;  // query rows 8 n + 2 c + e, element 2 n + e
  static constexpr int kSteps = dim / 16;
  static constexpr int kWords = dim / 32;  // code words per lane and 16 tokens
  static constexpr int kWide = kWords < 4 ? 2 : 4;
  static constexpr int kStepsPerGroup = kSteps / groups;
  static constexpr int kCodeBytes = kTokens * dim / 4;
  static constexpr int kMetaBytes = kTokens * groups * 4;
  static constexpr int kTileBytes = 2 * (kCodeBytes + kMetaBytes);
  static constexpr int kStages = dim == 256 ? 4 : 6;  // tiles in shared memory
  static constexpr int kLead = kStages / 2;           // tiles that are prefetched
  static constexpr int kRows = dim == 256 ? 16 : 32;  // BF16 tokens per stage
  static constexpr int kRowBytes = 2 * dim + 16;      // padded against bank conflicts
  static constexpr int kRowStages = 3;
  static constexpr int kHoldPages = 16;  // pages between two calls of HeldSums::Take
};

// Traits of the wgmma path. kExact serves fp32 outputs: q' has two fp16 parts, and the softmax sum
// adds rounded probabilities. For BF16 outputs one part is enough, because rounding the output
// costs four times as much. kSoftCap: logits are capped.
template <int dim, int groups, bool exact, bool soft_cap>
struct WgmmaTraits : Traits<dim, groups, 4> {
  static constexpr bool kExact = exact;
  static constexpr bool kSoftCap = soft_cap;
  static constexpr int kQueryParts = exact ? 2 : 1;
};

// Shared memory of a block.
template <class T>
struct Shared {
  // Query operands of each warp: [query tile][pair of steps][lane].
  uint4 query[T::kWarps][T::kQueryTiles][T::kSteps / 2][32];
  union {
    char tiles[T::kStages][T::kTileBytes];
    char rows[T::kRowStages][2][T::kRows][T::kRowBytes];  // K, V
  };
  // Terms of two query rows and a group. x and y: the initial value of integer sums, minus 1.5
  // times the sum of the rounded row, as integers on top of kDotMiddle's bits; z and w: sums of q',
  // in log2 units.
  float4 query_terms[T::kWarps][T::kGroups][T::kQueryRows / 2];
  // Terms for two query rows: the unit of the integer sums in log2 units (x, y), and minus the
  // middle times that unit (z, w).
  float4 query_unit[T::kWarps][T::kQueryRows / 2];
  float bias[T::kWarps][T::kQueryRows];  // bias of INT2 logits, log2 units
  // Softmax sums and deferred factors of HeldSums.
  float held_sum[T::kLaneQueryRows][T::kThreads];
  float held_factor[T::kLaneQueryRows][T::kThreads];
  int token[T::kWarps][T::kQueryRows];  // fresh token of the query row
  int row[T::kWarps][T::kQueryRows];    // index in q and out; negative: no such row
};

// The work of a block: kBlockQueryRows query rows of one (sequence, KV head).
template <class T>
struct Block {
  int sequence, head;
  int heads;        // query heads per KV head
  int first_token;  // fresh token of the first query row
  int last_token;   // fresh token of the last query row that exists
  int query_rows;   // query rows that exist
  int sink, pages, fresh;
  int paged;   // tokens of BF16 pages
  int recent;  // tokens of BF16 pages and older BF16 tokens behind them
  int begin;   // index of the first fresh token in q
  float scale;

  __device__ __forceinline__ explicit Block(const PrefillAttentionParams& p)
      : sequence(blockIdx.z), head(blockIdx.y), heads(p.shape.q_heads / p.shape.kv_heads) {
    const PrefillLengths& l = p.lengths;
    fresh = l.fresh_tokens[sequence];
    // Blocks with the last query rows attend most tokens, so they start first.
    const int64_t first = static_cast<int64_t>(gridDim.x - 1 - blockIdx.x) * T::kBlockQueryRows;
    query_rows = static_cast<int>(max(int64_t{0}, min(static_cast<int64_t>(fresh) * heads - first,
                                                      static_cast<int64_t>(T::kBlockQueryRows))));
    if (query_rows == 0) return;
    first_token = static_cast<int>(first / heads);
    last_token = static_cast<int>((first + query_rows - 1) / heads);
    first_query_row = first;
    sink = l.sink_tokens[sequence];
    pages = l.pages[sequence];
    paged = kPageRows * Bf16Pages(l, sequence);
    recent = paged + l.recent_tokens[sequence];
    begin = l.fresh_begin[sequence];
    scale = p.scale != 0.0f ? p.scale : rsqrtf(static_cast<float>(T::kDim));
  }

  int64_t first_query_row;

  __device__ __forceinline__ int before_fresh() const { return sink + T::kTokens * pages + recent; }
  // Returns the first position that fresh token `token` attends.
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

// Returns cap tanh(logit / cap) by tanh(x) = 1 - 2 / (1 + e^2x); the error is below 2e-7 cap.
__device__ __forceinline__ float SoftCap(float logit, float cap) {
  const float power = ptx::Exp2(logit * __fdividef(2.0f * kLog2E, cap));
  return fmaf(-2.0f * cap, ptx::Reciprocal(1.0f + power), cap);
}

// Running softmax and output of a lane's query rows. Accumulator element 2 a + e of (query tile n,
// channel tile m) is channel 16 m + 8 a + r of query row 8 n + 2 c + e.
template <class T>
struct State {
  float out[T::kQueryTiles][T::kSteps][4];
  float sum[T::kLaneQueryRows];          // sum of p over this lane's tokens
  float running_max[T::kLaneQueryRows];  // p = 2^(logit - running_max)
  uint32_t seen;                         // bit i: query row i has a running max
  float headroom;        // p reaches 2^headroom at the maximum, which uses fp16's range
  uint32_t scale_bound;  // fp16 bits of the largest v_scale that headroom allows

  __device__ __forceinline__ void Clear() {
#pragma unroll
    for (int n = 0; n < T::kQueryTiles; ++n) {
#pragma unroll
      for (int m = 0; m < T::kSteps; ++m) {
#pragma unroll
        for (int i = 0; i < 4; ++i) out[n][m][i] = 0.0f;
      }
    }
#pragma unroll
    for (int i = 0; i < T::kLaneQueryRows; ++i) sum[i] = running_max[i] = 0.0f;
    seen = 0;
    headroom = 0.0f;
    scale_bound = 0;
  }

  // A quick test before MustMove, on logits `t` minus the running max. Compared as integers,
  // positive floats have their order and negative ones are below them.
  __device__ __forceinline__ bool MayMove(const float (&t)[2][T::kQueryTiles][4]) const {
    int most[4] = {};  // independent chains
#pragma unroll
    for (int v = 0; v < 2; ++v) {
#pragma unroll
      for (int n = 0; n < T::kQueryTiles; ++n) {
        int& x = most[n % 2 * 2];
        int& y = most[n % 2 * 2 + 1];
        x = __vimax3_s32(x, __float_as_int(t[v][n][0]), __float_as_int(t[v][n][1]));
        y = __vimax3_s32(y, __float_as_int(t[v][n][2]), __float_as_int(t[v][n][3]));
      }
    }
    const int all = max(max(most[0], most[1]), max(most[2], most[3]));
    return all > __float_as_int(headroom + kLag) || seen != (1u << T::kLaneQueryRows) - 1;
  }

  // Returns whether the running max has to be raised. `best` are this lane's largest logits minus
  // the running max.
  __device__ __forceinline__ bool MustMove(const float (&best)[T::kLaneQueryRows]) const {
    bool moves = false;
#pragma unroll
    for (int i = 0; i < T::kLaneQueryRows; ++i) moves |= best[i] > headroom + kLag;
    if (seen != (1u << T::kLaneQueryRows) - 1) {
#pragma unroll
      for (int i = 0; i < T::kLaneQueryRows; ++i) {
        moves |= (seen >> i & 1) == 0 && best[i] > -INFINITY;
      }
    }
    return moves;
  }

  // Raises the running max for larger logits, or headroom for larger value scales. moved[i] is by
  // how much the running max of query row i grew; the caller multiplies its other sums by
  // factor[i].
  __device__ __forceinline__ void Move(const float (&best)[T::kLaneQueryRows], uint32_t scale_most,
                                       float (&moved)[T::kLaneQueryRows],
                                       float (&factor)[T::kLaneQueryRows]) {
    const float old_headroom = headroom;
    for (int step = 4; step < 32; step *= 2) {
      scale_most = max(scale_most, __shfl_xor_sync(~0u, scale_most, step));
    }
    if (scale_most > scale_bound) {
      // The bound is the power of two above: p * v_scale stays below 2^(10 + kLag).
      headroom = 9.0f - ilogbf(fmaxf(ptx::LowHalf(scale_most), 0x1p-24f));
      scale_bound = scale_most;
    }
#pragma unroll
    for (int i = 0; i < T::kLaneQueryRows; ++i) {
      const bool known = seen >> i & 1;
      float maximum = MaxOverRows(best[i]);
      if (known) maximum = fmaxf(maximum, old_headroom);
      if (maximum > -INFINITY) seen |= 1u << i;
      moved[i] = maximum > -INFINITY ? maximum - headroom : 0.0f;
      factor[i] = known ? ptx::Exp2(-moved[i]) : 1.0f;
      running_max[i] += moved[i];
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
