// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "kernels/cuda/decode/decode_ptx.cuh"
#include "kernels/cuda/decode/traits.cuh"

// Attention of a few query rows over BF16 rows (sink, BF16 pages, recent window): one warp attends
// 16 tokens at a time. Fragments are those of the INT2 path, but the query is exact and
// probabilities are split into two bf16 parts.
namespace crumb::kernels::cuda {

// Loads the query rows, one fragment per 16 channels. Rows that do not exist are zero.
template <class T>
__device__ __forceinline__ void LoadQueryRows(const DecodeKernelParams& k, const Segment& segment,
                                              int lane,
                                              uint32_t (&q)[T::kQueryTiles][T::kSteps][2]) {
  const QueryRows rows = RowsOf<T>(k);
#pragma unroll
  for (int n = 0; n < T::kQueryTiles; ++n) {
    const int column = lane / 4;
    const int row = 8 * n + (T::Interleaved(n) ? column / 2 : column);
    const bool exists = row < rows.count && (!T::Interleaved(n) || column % 2 == 0);
    const uint32_t* from =
        exists ? reinterpret_cast<const uint32_t*>(
                     static_cast<const Bf16*>(k.p.q) +
                     rows.IndexOf(k, segment.sequence, segment.head, row) * T::kDim) +
                     lane % 4
               : nullptr;
#pragma unroll
    for (int s = 0; s < T::kSteps; ++s) {
      q[n][s][0] = exists ? from[8 * s] : 0;
      q[n][s][1] = exists ? from[8 * s + 4] : 0;
    }
  }
}

// Computes the scores of the 16 tokens of a chunk, before scaling.
template <class T>
__device__ __forceinline__ void ScoreChunk(const uint32_t (&q)[T::kQueryTiles][T::kSteps][2],
                                           uint32_t slot, int lane,
                                           float (&score)[2][T::kLaneRows]) {
  float acc[T::kQueryTiles][4] = {};
  const uint32_t address = slot + ChunkRowAt<T::kDim>(ChunkToken(lane % 16)) + lane / 16 * 16;
#pragma unroll
  for (int s = 0; s < T::kSteps; ++s) {
    uint32_t a[4];
    ptx::LoadMatrices(a, address + 32 * s);
#pragma unroll
    for (int n = 0; n < T::kQueryTiles; ++n) ptx::MmaBf16(acc[n], a, q[n][s][0], q[n][s][1]);
  }
#pragma unroll
  for (int a = 0; a < 2; ++a) {
#pragma unroll
    for (int i = 0; i < T::kLaneRows; ++i) {
      score[a][i] = acc[i / 2][2 * a + i % 2];
    }
  }
}

struct WindowLengths {
  int sink;
  int pages;
  int recent;  // tokens of BF16 pages included
};

// Scales and caps scores, in log2 units, and sets them to -infinity where a row may not attend.
template <class T>
__device__ __forceinline__ void FinishScores(const DecodeKernelParams& k,
                                             const WindowLengths& lengths,
                                             const ChunkSource& source, int lane,
                                             float (&score)[2][T::kLaneRows]) {
  const QueryRows rows = RowsOf<T>(k);
  const int before_recent = lengths.sink + lengths.pages * T::kTokens;
  const int total = before_recent + lengths.recent;
  const int first = source.first + (source.sink ? 0 : before_recent);
#pragma unroll
  for (int i = 0; i < T::kLaneRows; ++i) {
    const RowSpan span = SpanOf<T>(k, total, rows.TokenOf(min(T::RowOf(lane, i), rows.count - 1)));
#pragma unroll
    for (int a = 0; a < 2; ++a) {
      const int row = ChunkToken(8 * a + lane / 4), position = first + row;
      // With one query token and no sliding window a row attends all positions.
      const bool attends =
          row < source.rows && (T::kFastPath || (position >= span.first && position <= span.last));
      const float logit = HasSoftCap<T>(k) ? SoftCap(score[a][i] * k.scale, k.p.soft_cap) * kLog2E
                                           : score[a][i] * k.log2_scale;
      score[a][i] = attends ? logit : -INFINITY;
    }
  }
}

// Clears the rows of a chunk's V slot that hold no token: old bytes may be NaN, and 0 * NaN would
// spread.
template <class T>
__device__ __forceinline__ void ClearMissingRows(uint32_t slot, int rows, int lane) {
  constexpr int kPieces = T::kDim / 8;
  for (int i = rows * kPieces + lane; i < kChunkTokens * kPieces; i += 32) {
    ptx::StoreShared128(slot + ChunkRowAt<T::kDim>(i / kPieces) + i % kPieces * 16,
                        make_uint4(0, 0, 0, 0));
  }
  __syncwarp();
}

template <class T>
__device__ __forceinline__ void AddChunkValues(uint32_t slot, int lane,
                                               const float (&p)[2][T::kLaneRows],
                                               SegmentState<T>& state) {
  uint32_t b[T::kQueryTiles][2][2];  // interleaved: high and low parts are neighbouring columns
#pragma unroll
  for (int n = 0; n < T::kQueryTiles; ++n) {
#pragma unroll
    for (int a = 0; a < 2; ++a) {
      uint32_t high, low;
      if (T::Interleaved(n)) {
        ptx::SplitBf16(p[a][2 * n], 0.0f, &high, &low);
        b[n][0][a] = ptx::TransposeMatrix((high & 0xffff) | low << 16);
      } else {
        ptx::SplitBf16(p[a][2 * n], p[a][(2 * n + 1) % T::kLaneRows], &high, &low);
        b[n][0][a] = ptx::TransposeMatrix(high);
        b[n][1][a] = ptx::TransposeMatrix(low);
      }
    }
  }
  const uint32_t address =
      slot + ChunkRowAt<T::kDim>(ChunkToken(lane % 8 + lane / 16 * 8)) + lane / 8 % 2 * 16;
#pragma unroll
  for (int m = 0; m < T::kSteps; ++m) {
    uint32_t a[4];
    ptx::LoadMatricesTransposed(a, address + 32 * m);
#pragma unroll
    for (int n = 0; n < T::kQueryTiles; ++n) {
#pragma unroll
      for (int part = 0; part < (T::Interleaved(n) ? 1 : 2); ++part) {
        ptx::MmaBf16(state.out[n][m], a, b[n][part][0], b[n][part][1]);
      }
    }
  }
}

// Attends the warp's chunks of a segment of BF16 rows. The last slot is released but not filled
// again.
template <class T, class Ring>
__device__ __forceinline__ void AttendBf16(const DecodeKernelParams& k, const Segment& segment,
                                           const Worker& worker, Ring& ring,
                                           SegmentState<T>& state) {
  const int lane = threadIdx.x % 32;
  uint32_t q[T::kQueryTiles][T::kSteps][2];
  LoadQueryRows<T>(k, segment, lane, q);
  const WindowLengths lengths = {k.p.lengths.sink_tokens[segment.sequence],
                                 k.p.lengths.pages[segment.sequence],
                                 WindowTokens(k.p.lengths, segment.sequence)};
  for (int chunk = segment.begin + worker.warp; chunk < segment.end; chunk += worker.warps) {
    const ChunkSource source = SourceOf(lengths.sink, lengths.recent, chunk);
    float score[2][T::kLaneRows];
    ScoreChunk<T>(q, ring.Wait(k), lane, score);
    ring.FenceWrites();  // the slot was written by cp.async or ordinary stores
    ring.Release(k);
    ring.Fill(k);
    FinishScores<T>(k, lengths, source, lane, score);

    bool grows = false;
    float best[T::kLaneRows];
#pragma unroll
    for (int i = 0; i < T::kLaneRows; ++i) {
      best[i] = fmaxf(score[0][i], score[1][i]);
      grows |= best[i] - state.running_max[i] > kLag;
    }
    if (__any_sync(~0u, grows)) {
#pragma unroll
      for (int i = 0; i < T::kLaneRows; ++i) {
        state.RaiseRunningMax(i, fmaxf(MaxOverTokens(best[i]), state.running_max[i]));
      }
    }
    float p[2][T::kLaneRows];
#pragma unroll
    for (int i = 0; i < T::kLaneRows; ++i) {
#pragma unroll
      for (int a = 0; a < 2; ++a) {
        p[a][i] = ptx::Exp2(score[a][i] - state.running_max[i]);
        state.sum[i] += p[a][i];
      }
    }
    const uint32_t slot = ring.Wait(k);
    if (source.rows < kChunkTokens) ClearMissingRows<T>(slot, source.rows, lane);
    AddChunkValues<T>(slot, lane, p, state);
    ring.FenceWrites();
    ring.Release(k);
    if (chunk + worker.warps < segment.end) ring.Fill(k);
  }
}

}  // namespace crumb::kernels::cuda
