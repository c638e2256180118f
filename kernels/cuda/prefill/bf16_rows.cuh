// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "kernels/cuda/prefill/int2_pages.cuh"

// Attention of a warp's query rows over BF16 rows: sink, BF16 pages, recent ring and the fresh
// tokens themselves, in that order. The query is exact; probabilities are split into two bf16
// parts.
namespace crumb::kernels::cuda::prefill {

// Addresses of the K rows of the block's KV head. BF16 tokens are numbered across all four sources.
struct RowSources {
  uint64_t sink, recent, fresh;
  const uint64_t* pages;  // addresses of BF16 pages
  int recent_begin;

  template <class T>
  __device__ __forceinline__ RowSources(const PrefillAttentionParams& p, const Block<T>& block)
      : sink(0), recent(0), pages(nullptr), recent_begin(0) {
    if (block.sink > 0) {
      sink = p.sink.address[block.sequence] + p.sink.layer_offset + block.head * p.sink.head_stride;
    }
    if (block.paged > 0) {
      pages =
          p.page_address + static_cast<int64_t>(block.sequence) * p.shape.max_pages + block.pages;
    }
    if (block.recent > block.paged) {
      recent = p.recent.address[block.sequence] + p.recent.layer_offset +
               block.head * p.recent.head_stride;
      recent_begin = p.lengths.recent_begin[block.sequence];
    }
    const int row =
        p.lengths.fresh_row == nullptr ? block.begin : p.lengths.fresh_row[block.sequence];
    fresh = static_cast<uint64_t>(row * p.token_stride + block.head * p.head_stride) * sizeof(Bf16);
  }

  template <class T>
  __device__ __forceinline__ uint64_t Address(const PrefillAttentionParams& p,
                                              const Block<T>& block, int token, bool value) const {
    if (token < block.sink)
      return sink + token * p.sink.token_stride + (value ? p.sink.v_offset : 0);
    token -= block.sink;
    if (token < block.paged) {
      return pages[token / kPageRows] + p.sink.layer_offset + block.head * p.sink.head_stride +
             token % kPageRows * p.sink.token_stride + (value ? p.sink.v_offset : 0);
    }
    if (token < block.recent) {
      int slot = token - block.paged + recent_begin;
      if (slot >= p.recent_capacity) slot -= p.recent_capacity;
      return recent + slot * p.recent.token_stride + (value ? p.recent.v_offset : 0);
    }
    token -= block.recent;
    return reinterpret_cast<uint64_t>(value ? p.v : p.k) + fresh +
           token * p.token_stride * static_cast<int64_t>(sizeof(Bf16));
  }
};

// Copies tokens first to first + kRows - 1 into stage `stage`, and zeros from `end` on. All threads
// call it.
template <class T>
__device__ __forceinline__ void FillRows(const PrefillAttentionParams& p, const Block<T>& block,
                                         const RowSources& sources, int first, int end, int stage,
                                         Shared<T>& shared) {
  constexpr int kPieces = T::kDim / 8;
  if (first < end) {
    for (int i = threadIdx.x; i < 2 * T::kRows * kPieces; i += T::kThreads) {
      const int piece = i % kPieces, row = i / kPieces % T::kRows, value = i / kPieces / T::kRows;
      char* to = shared.rows[stage][value][row] + 16 * piece;
      if (first + row < end) {
        ptx::CopyAsync16(ptx::SharedAddress(to), reinterpret_cast<const uint4*>(sources.Address(
                                                     p, block, first + row, value != 0)) +
                                                     piece);
      } else {
        *reinterpret_cast<uint4*>(to) = make_uint4(0, 0, 0, 0);
      }
    }
  }
  ptx::CommitCopies();
}

// Computes the scores of kHalves times 16 tokens, before scaling.
template <class T, int kHalves>
__device__ __forceinline__ void ScoreRows(const Shared<T>& shared, int warp, int lane,
                                          const char* rows,
                                          float (&t)[kHalves][T::kQueryTiles][4]) {
#pragma unroll
  for (int v = 0; v < kHalves; ++v) {
#pragma unroll
    for (int n = 0; n < T::kQueryTiles; ++n) t[v][n][0] = t[v][n][1] = t[v][n][2] = t[v][n][3] = 0;
  }
  const uint32_t address = ptx::SharedAddress(rows) + lane % 16 * T::kRowBytes + lane / 16 * 16;
#pragma unroll
  for (int s = 0; s < T::kSteps; s += 2) {
    uint4 q[T::kQueryTiles];
#pragma unroll
    for (int n = 0; n < T::kQueryTiles; ++n) q[n] = shared.query[warp][n][s / 2][lane];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int v = 0; v < kHalves; ++v) {
        uint32_t a[4];
        ptx::LoadMatrices(a, address + 16 * v * T::kRowBytes + 32 * (s + half));
#pragma unroll
        for (int n = 0; n < T::kQueryTiles; ++n) {
          ptx::MmaBf16(t[v][n], a, half == 0 ? q[n].x : q[n].z, half == 0 ? q[n].y : q[n].w);
        }
      }
    }
  }
}

template <class T>
__device__ __forceinline__ void FinishRowScores(const PrefillAttentionParams& p,
                                                const Block<T>& block, const Shared<T>& shared,
                                                int warp, int lane, int first, bool masked,
                                                const State<T>& state,
                                                float (&t)[T::kQueryTiles][4]) {
  float factor = block.scale * kLog2E;
  if (p.soft_cap > 0.0f) {
#pragma unroll
    for (int n = 0; n < T::kQueryTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) t[n][i] = SoftCap(t[n][i] * block.scale, p.soft_cap);
    }
    factor = kLog2E;
  }
#pragma unroll
  for (int n = 0; n < T::kQueryTiles; ++n) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const float running_max = state.running_max[2 * n + e];
#pragma unroll
      for (int a = 0; a < 2; ++a) {
        float& x = t[n][2 * a + e];
        x = fmaf(x, factor, -running_max);
      }
      if (!masked) continue;
      const int own = shared.token[warp][8 * n + 2 * (lane % 4) + e];
      const int last = block.sink + block.recent + own;
      const int first_position = block.FirstPosition(p, own);
#pragma unroll
      for (int a = 0; a < 2; ++a) {
        const int token = first + 8 * a + lane / 4;
        const int position = token + (token < block.sink ? 0 : T::kTokens * block.pages);
        if (token > last || position < first_position) t[n][2 * a + e] = -INFINITY;
      }
    }
  }
}

template <class T>
__device__ __forceinline__ void AddRows(const char* rows, int lane,
                                        const float (&t)[T::kQueryTiles][4], State<T>& state) {
  uint32_t high[T::kQueryTiles][2], low[T::kQueryTiles][2];
#pragma unroll
  for (int n = 0; n < T::kQueryTiles; ++n) {
#pragma unroll
    for (int a = 0; a < 2; ++a) {
      const float p0 = ptx::Exp2(t[n][2 * a]), p1 = ptx::Exp2(t[n][2 * a + 1]);
      state.sum[2 * n] += p0;
      state.sum[2 * n + 1] += p1;
      ptx::SplitBf16(p0, p1, &high[n][a], &low[n][a]);
      high[n][a] = ptx::TransposeMatrix(high[n][a]);
      low[n][a] = ptx::TransposeMatrix(low[n][a]);
    }
  }
  const uint32_t address =
      ptx::SharedAddress(rows) + (lane % 8 + lane / 16 * 8) * T::kRowBytes + lane / 8 % 2 * 16;
#pragma unroll
  for (int m = 0; m < T::kSteps; ++m) {
    uint32_t a[4];
    ptx::LoadMatricesTransposed(a, address + 32 * m);
#pragma unroll
    for (int n = 0; n < T::kQueryTiles; ++n) {
      ptx::MmaBf16(state.out[n][m], a, low[n][0], low[n][1]);
      ptx::MmaBf16(state.out[n][m], a, high[n][0], high[n][1]);
    }
  }
}

// Attends the tokens first to first + kRows - 1 of one stage with the warp's query rows.
template <class T>
__device__ __forceinline__ void AttendStage(const PrefillAttentionParams& p, const Block<T>& block,
                                            int first, int stage, const Shared<T>& shared, int warp,
                                            int lane, State<T>& state) {
  constexpr int kHalves = T::kRows / 16;
  const int query_rows = min(T::kQueryRows, block.query_rows - warp * T::kQueryRows);
  const int before = block.sink + block.recent;
  const int first_own = shared.token[warp][0], last_own = shared.token[warp][query_rows - 1];
  if (first > before + last_own) return;
  const bool masked = p.window > 0 || first + T::kRows - 1 > before + first_own;
  float t[kHalves][T::kQueryTiles][4];
  ScoreRows<T, kHalves>(shared, warp, lane, shared.rows[stage][0][0], t);
#pragma unroll
  for (int v = 0; v < kHalves; ++v) {
    FinishRowScores<T>(p, block, shared, warp, lane, first + 16 * v, masked, state, t[v]);
  }
  float best[T::kLaneQueryRows];
  LargestLogits<T, kHalves>(t, best);
  if (__any_sync(~0u, state.MustMove(best))) {
    float factor[T::kLaneQueryRows];
    Follow<T, kHalves>(state, best, 0, t, factor);
  }
#pragma unroll
  for (int v = 0; v < kHalves; ++v) {
    AddRows<T>(shared.rows[stage][1][16 * v], lane, t[v], state);
  }
}

// Attends all BF16 tokens with the block's query rows. Every thread of the block calls it.
template <class T>
__device__ __forceinline__ void AttendRows(const PrefillAttentionParams& p, const Block<T>& block,
                                           Shared<T>& shared, int warp, int lane, State<T>& state) {
  const bool active = warp * T::kQueryRows < block.query_rows;
  const int end = block.sink + block.recent + block.last_token + 1;
  // Tokens before `begin` are outside the sliding window of every query row.
  int begin = 0;
  const int first_position = block.FirstPosition(p, block.first_token);
  if (first_position >= block.sink + T::kTokens * block.pages) {
    begin = first_position - T::kTokens * block.pages;
  }
  const RowSources sources(p, block);
  __syncthreads();
  FillRows<T>(p, block, sources, begin, end, 0, shared);
  FillRows<T>(p, block, sources, begin + T::kRows, end, 1, shared);
  int stage = 0;
  for (int first = begin; first < end; first += T::kRows) {
    ptx::WaitCopies<1>();
    __syncthreads();
    FillRows<T>(p, block, sources, first + 2 * T::kRows, end, stage == 0 ? 2 : stage - 1, shared);
    if (active) AttendStage<T>(p, block, first, stage, shared, warp, lane, state);
    stage = stage == 2 ? 0 : stage + 1;
  }
  ptx::WaitCopies<0>();
}

}  // namespace crumb::kernels::cuda::prefill
