// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "kernels/cuda/decode/tile_ring.cuh"

namespace crumb::kernels::cuda {

// Logits are compared with this where nothing has been seen; finite, so that differences are.
inline constexpr float kNoLogit = -1e30f;
inline constexpr float kLog2E = 1.4426950408889634f;
// A maximum is followed only when it grows by more than this many powers of two: probabilities may
// be that much above 1, and accumulators are rescaled rarely.
inline constexpr float kLag = 4.0f;

// Compile-time sizes of the decode kernel. The score product multiplies codes (bytes) with q' in 16
// bits, split into two signed bytes. High and low bytes are columns of two products; with kPair, in
// the last column tile, neighbouring columns of one, for half as many rows.
template <int dim, int groups, int column_tiles, bool pair, bool bulk>
struct DecodeTraits {
  static constexpr int kDim = dim;
  static constexpr int kGroups = groups;  // quantization groups of a row
  static constexpr int kColumnTiles = column_tiles;
  static constexpr bool kPair = pair;
  static constexpr bool kBulk = bulk;
  static constexpr bool kPlain = false;
  static constexpr bool kStaged = false;  // see ClusterLayout
  // Whether plain calls have a kernel of their own without clusters, too.
  static constexpr bool kPlainPlanned = bulk && dim == 128 && groups == 1 && column_tiles == 1;
  static constexpr int kTokens = 64;
  static constexpr int kSteps = dim / 16;  // fragments along the channels
  static constexpr int kWords = dim / 32;  // code words per lane and 16 tokens
  // Score products: 64 channels take two, each of them twice where they span two groups.
  static constexpr int kGroupSplit = dim / groups == 32 ? 2 : 1;
  static constexpr int kDotSteps = dim / 32 * kGroupSplit;
  static constexpr int kDotTiles = 2 * column_tiles - (pair ? 1 : 0);  // of 8 columns
  static constexpr int kRows = 8 * column_tiles - (pair ? 4 : 0);      // query rows, with padding
  static constexpr int kLaneRows = 2 * column_tiles - (pair ? 1 : 0);  // query rows of one lane
  static constexpr int kFragmentWords = kDotTiles * kDotSteps * 64;    // of a rotated query
  static constexpr int kCodeBytes = kTokens * dim / 4;
  static constexpr int kMetaBytes = kTokens * groups * 4;
  static constexpr int kTileBytes = 2 * (kCodeBytes + kMetaBytes);
  static constexpr int kRank = (column_tiles * dim + 127) / 128;
  static constexpr int kThreadsMax = 32 * WarpsFor(dim, column_tiles);
  // kLag of INT2 keys: a key that has most of a row is to be a maximum that is followed, as others'
  // weights are rounded. With more rows one of them grows more often, and moving takes longer.
  static constexpr float kKeyLag = column_tiles == 1 && pair ? 1.0f : 2.0f;
  // 16-token groups whose scores are made together, as registers allow: independent products.
  static constexpr int kTogether = kRank * kDotTiles * groups <= 2 ? 2 : 1;
  // 16-token groups between two looks at the maxima: fewer where scores take many registers.
  static constexpr int kSoftmaxGroups = column_tiles == 1 ? 4 : 2;
  static constexpr int kLevelPages = 32;  // of a warp, between two levellings

  using Ring = TileRing<dim, bulk>;

  // Column tile n holds 4 rows, in pairs of columns.
  __host__ __device__ static constexpr bool Paired(int n) { return pair && n == column_tiles - 1; }
  // Outputs of one lane in column tile n, after hi and lo columns are added.
  __host__ __device__ static constexpr int LaneValues(int n) {
    return kSteps * (Paired(n) ? 2 : 4);
  }

  static_assert(kChunkTokens / 2 * kPairBytes<dim> <= kTileBytes, "a chunk's rows fit a slot");
  static_assert(LaneValues(0) * 32 * 4 <= kTileBytes, "a warp's outputs fit a slot");

  // The query row of a lane's i-th element, i < kLaneRows.
  __device__ static __forceinline__ int RowOf(int lane, int i) {
    return 8 * (i / 2) + (Paired(i / 2) ? lane % 4 : 2 * (lane % 4) + i % 2);
  }
};

// Of a kernel for calls as most are: one query token, rows of bf16, both rotations, no cap, no
// sliding window. Less code and fewer registers. IsPlain tells which calls are such.
template <class General>
struct PlainTraits : General {
  static constexpr bool kPlain = true;
  static constexpr bool kStaged = StagesFactors(General::kColumnTiles, General::kPair);
};

// What other calls may ask for.
template <class T>
__device__ __forceinline__ bool Capped(const DecodeKernelParams& k) {
  return !T::kPlain && k.p.soft_cap > 0.0f;
}
template <class T>
__device__ __forceinline__ bool Windowed(const DecodeKernelParams& k) {
  return !T::kPlain && k.p.window > 0;
}
template <class T>
__device__ __forceinline__ bool RotatesKeys(const DecodeKernelParams& k) {
  return T::kPlain || k.p.rotation_k != nullptr;
}
template <class T>
__device__ __forceinline__ bool RotatesValues(const DecodeKernelParams& k) {
  return T::kPlain || k.p.rotation_v != nullptr;
}

// Running softmax and output of one warp over one segment. Probabilities are 2^(logit -
// reference); `sum` counts this lane's tokens only.
template <class T>
struct SegmentState {
  float out[T::kColumnTiles][T::kSteps][4] = {};  // channels x columns
  float sum[T::kLaneRows] = {};
  float reference[T::kLaneRows];

  __device__ __forceinline__ SegmentState() {
#pragma unroll
    for (int i = 0; i < T::kLaneRows; ++i) reference[i] = kNoLogit;
  }

  // Moves the reference of row element i, scaling what was summed under the old one.
  __device__ __forceinline__ float MoveReference(int i, float to) {
    const float factor = ptx::Exp2(reference[i] - to);
    reference[i] = to;
    sum[i] *= factor;
#pragma unroll
    for (int s = 0; s < T::kSteps; ++s) {
      float(&o)[4] = out[i / 2][s];
      if (T::Paired(i / 2)) {
        for (int e = 0; e < 4; ++e) o[e] *= factor;
      } else {
        o[i % 2] *= factor;
        o[2 + i % 2] *= factor;
      }
    }
    return factor;
  }
};

// Combines a value over the 8 lanes that share columns (lanes with equal lane % 4).
__device__ __forceinline__ float MaxOverTokens(float x) {
  for (int step = 4; step < 32; step *= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, step));
  return x;
}
__device__ __forceinline__ float SumOverTokens(float x) {
  for (int step = 4; step < 32; step *= 2) x += __shfl_xor_sync(~0u, x, step);
  return x;
}

// The query rows of a KV head that a launch looks after. Of all rows, first + row = q_token * heads
// + head of the group.
struct QueryRows {
  int heads;    // query heads per KV head
  int first;    // row of the launch
  int columns;  // rows that exist
  bool one;     // query token
  bool plain;   // of PlainTraits

  __device__ __forceinline__ explicit QueryRows(const DecodeKernelParams& k, bool plain = false)
      : heads(k.heads),
        first(k.first_row),
        columns(k.columns),
        one(plain || k.p.shape.q_tokens == 1),
        plain(plain) {}
  // A division takes longer than the question whether there is one token.
  __device__ __forceinline__ int TokenOf(int row) const { return one ? 0 : (first + row) / heads; }
  __device__ __forceinline__ int HeadOf(int row) const {
    return plain ? min(first + row, heads - 1) : (first + row) % heads;
  }
  // Index of (sequence, row) in arrays [batch, q_tokens, q_heads].
  __device__ __forceinline__ int64_t IndexOf(const DecodeKernelParams& k, int sequence, int head,
                                             int row) const {
    const int token = TokenOf(row);
    return (static_cast<int64_t>(sequence) * k.p.shape.q_tokens + token) * k.p.shape.q_heads +
           head * heads + first + row - token * heads;
  }
};

template <class T>
__device__ __forceinline__ QueryRows RowsOf(const DecodeKernelParams& k) {
  return QueryRows(k, T::kPlain);
}

// Which positions a row may attend: first..last.
struct RowSpan {
  int first;
  int last;
};
template <class T>
__device__ __forceinline__ RowSpan SpanOf(const DecodeKernelParams& k, int total, int q_token) {
  RowSpan span;
  span.last = total - k.p.shape.q_tokens + q_token;
  span.first = Windowed<T>(k) ? span.last - k.p.window + 1 : 0;
  return span;
}

__device__ __forceinline__ float SoftCap(float logit, float cap) {
  return cap * tanhf(logit / cap);
}

}  // namespace crumb::kernels::cuda
