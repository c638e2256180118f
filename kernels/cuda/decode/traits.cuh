// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "kernels/cuda/decode/tile_ring.cuh"

namespace crumb::kernels::cuda {

// Running max of rows that have no logit yet; finite, so that differences are.
inline constexpr float kNoLogit = -1e30f;
inline constexpr float kLog2E = 1.4426950408889634f;
// The running max is raised only when the maximum has grown by more than this many powers of two.
// Probabilities may exceed 1 by as much, and accumulators are rescaled rarely.
inline constexpr float kLag = 4.0f;

// Compile-time sizes of the decode kernels. The score MMA multiplies codes (bytes) by q' in 16
// bits, which is split into a high and a low signed byte. High and low bytes are two MMAs of 8
// query rows each; in an interleaved query tile they are neighbouring columns of one MMA, for 4
// query rows.
template <int dim, int groups, int query_tiles, bool interleaved, bool bulk>
struct DecodeTraits {
  static constexpr int kDim = dim;
  static constexpr int kGroups = groups;  // quantization groups per row
  static constexpr int kQueryTiles = query_tiles;
  static constexpr bool kInterleaved = interleaved;
  static constexpr bool kBulk = bulk;
  static constexpr bool kFastPath = false;
  static constexpr bool kStaged = false;  // see StagesFactors
  // Whether fast path calls have a kernel of their own in the planned schedule, too.
  static constexpr bool kPlannedFastPath = bulk && dim == 128 && groups == 1 && query_tiles == 1;
  static constexpr int kTokens = 64;
  static constexpr int kSteps = dim / 16;  // MMA steps along the channels
  static constexpr int kWords = dim / 32;  // code words per lane and 16 tokens
  // Score MMAs: 64 channels take two steps, each of them twice if they span two groups.
  static constexpr int kGroupSplit = dim / groups == 32 ? 2 : 1;
  static constexpr int kDotSteps = dim / 32 * kGroupSplit;
  static constexpr int kDotTiles = 2 * query_tiles - (interleaved ? 1 : 0);  // tiles of 8 columns
  static constexpr int kRows = 8 * query_tiles - (interleaved ? 4 : 0);  // query rows, with padding
  static constexpr int kLaneRows = 2 * query_tiles - (interleaved ? 1 : 0);  // query rows per lane
  static constexpr int kFragmentWords = kDotTiles * kDotSteps * 64;  // words of a rotated query
  static constexpr int kCodeBytes = kTokens * dim / 4;
  static constexpr int kMetaBytes = kTokens * groups * 4;
  static constexpr int kTileBytes = 2 * (kCodeBytes + kMetaBytes);
  static constexpr int kRank = (query_tiles * dim + 127) / 128;
  static constexpr int kThreadsMax = 32 * WarpsFor(dim, query_tiles);
  // kLag for INT2 keys. It is smaller because the weights of other keys are rounded: a key that
  // holds most of a row should raise the running max. With more rows one of them grows more often,
  // and raising takes longer.
  static constexpr float kKeyLag = query_tiles == 1 && interleaved ? 1.0f : 2.0f;
  // 16-token groups whose score MMAs are interleaved, as far as registers allow.
  static constexpr int kTogether = kRank * kDotTiles * groups <= 2 ? 2 : 1;
  // 16-token groups between two tests of the maxima; fewer if scores need many registers.
  static constexpr int kSoftmaxGroups = query_tiles == 1 ? 4 : 2;
  static constexpr int kLevelPages = 32;  // pages of a warp between two calls of Level

  using Ring = TileRing<dim, bulk>;

  // Returns whether query tile n holds 4 rows in interleaved columns.
  __host__ __device__ static constexpr bool Interleaved(int n) {
    return interleaved && n == query_tiles - 1;
  }
  // Outputs of one lane in query tile n, after the columns of high and low bytes are added.
  __host__ __device__ static constexpr int LaneValues(int n) {
    return kSteps * (Interleaved(n) ? 2 : 4);
  }

  static_assert(kChunkTokens / 2 * kTokenPairBytes<dim> <= kTileBytes, "a chunk's rows fit a slot");
  static_assert(LaneValues(0) * 32 * 4 <= kTileBytes, "a warp's outputs fit a slot");

  // Returns the query row of a lane's i-th element, i < kLaneRows.
  __device__ static __forceinline__ int RowOf(int lane, int i) {
    return 8 * (i / 2) + (Interleaved(i / 2) ? lane % 4 : 2 * (lane % 4) + i % 2);
  }
};

// Traits of the fast path: kernels for calls with one query token, both rotations, no soft cap and
// no sliding window, which most calls are. They have less code and need fewer registers. IsFastPath
// tests a call.
template <class General>
struct FastPathTraits : General {
  static constexpr bool kFastPath = true;
  static constexpr bool kStaged = StagesFactors(General::kQueryTiles, General::kInterleaved);
};

// Options of a call. They are compile-time constants on the fast path.
template <class T>
__device__ __forceinline__ bool HasSoftCap(const DecodeKernelParams& k) {
  return !T::kFastPath && k.p.soft_cap > 0.0f;
}
template <class T>
__device__ __forceinline__ bool HasSlidingWindow(const DecodeKernelParams& k) {
  return !T::kFastPath && k.p.window > 0;
}
template <class T>
__device__ __forceinline__ bool RotatesKeys(const DecodeKernelParams& k) {
  return T::kFastPath || k.p.rotation_k != nullptr;
}
template <class T>
__device__ __forceinline__ bool RotatesValues(const DecodeKernelParams& k) {
  return T::kFastPath || k.p.rotation_v != nullptr;
}

// Running softmax and output of one warp over one segment. Probabilities are 2^(logit -
// running_max); `sum` is over this lane's tokens only.
template <class T>
struct SegmentState {
  float out[T::kQueryTiles][T::kSteps][4] = {};  // channels x query rows
  float sum[T::kLaneRows] = {};
  float running_max[T::kLaneRows];

  __device__ __forceinline__ SegmentState() {
#pragma unroll
    for (int i = 0; i < T::kLaneRows; ++i) running_max[i] = kNoLogit;
  }

  // Sets the running max of row element i and rescales its sums. Returns the factor.
  __device__ __forceinline__ float RaiseRunningMax(int i, float to) {
    const float factor = ptx::Exp2(running_max[i] - to);
    running_max[i] = to;
    sum[i] *= factor;
#pragma unroll
    for (int s = 0; s < T::kSteps; ++s) {
      float(&o)[4] = out[i / 2][s];
      if (T::Interleaved(i / 2)) {
        for (int e = 0; e < 4; ++e) o[e] *= factor;
      } else {
        o[i % 2] *= factor;
        o[2 + i % 2] *= factor;
      }
    }
    return factor;
  }
};

// Reduce a value over the 8 lanes that share query rows (lanes with equal lane % 4).
__device__ __forceinline__ float MaxOverTokens(float x) {
  for (int step = 4; step < 32; step *= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, step));
  return x;
}
__device__ __forceinline__ float SumOverTokens(float x) {
  for (int step = 4; step < 32; step *= 2) x += __shfl_xor_sync(~0u, x, step);
  return x;
}

// The query rows of a KV head that a launch processes. Row i of the launch is row first + i of the
// KV head, which is q_token * heads + head.
struct QueryRows {
  int heads;       // query heads per KV head
  int first;       // first row of the launch
  int count;       // rows that exist
  bool one;        // whether there is one query token
  bool fast_path;  // whether the kernel is on the fast path

  __device__ __forceinline__ explicit QueryRows(const DecodeKernelParams& k, bool fast_path = false)
      : heads(k.heads),
        first(k.first_row),
        count(k.query_rows),
        one(fast_path || k.p.shape.q_tokens == 1),
        fast_path(fast_path) {}
  // Testing for one token is faster than a division.
  __device__ __forceinline__ int TokenOf(int row) const { return one ? 0 : (first + row) / heads; }
  __device__ __forceinline__ int HeadOf(int row) const {
    return fast_path ? min(first + row, heads - 1) : (first + row) % heads;
  }
  // Returns the index of (sequence, row) in arrays [batch, q_tokens, q_heads].
  __device__ __forceinline__ int64_t IndexOf(const DecodeKernelParams& k, int sequence, int head,
                                             int row) const {
    const int token = TokenOf(row);
    return (static_cast<int64_t>(sequence) * k.p.shape.q_tokens + token) * k.p.shape.q_heads +
           head * heads + first + row - token * heads;
  }
};

template <class T>
__device__ __forceinline__ QueryRows RowsOf(const DecodeKernelParams& k) {
  return QueryRows(k, T::kFastPath);
}

// The positions that a row attends: first to last.
struct RowSpan {
  int first;
  int last;
};
template <class T>
__device__ __forceinline__ RowSpan SpanOf(const DecodeKernelParams& k, int total, int q_token) {
  RowSpan span;
  span.last = total - k.p.shape.q_tokens + q_token;
  span.first = HasSlidingWindow<T>(k) ? span.last - k.p.window + 1 : 0;
  return span;
}

__device__ __forceinline__ float SoftCap(float logit, float cap) {
  return cap * tanhf(logit / cap);
}

}  // namespace crumb::kernels::cuda
