// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "kernels/cpu/scratch.h"
#include "kernels/cpu/softmax.h"

// Attention of a block of rows over up to kBf16PieceTokens BF16 rows at one stride: a part of the
// sink, of a BF16 page or of the recent window.
namespace crumb::kernels {

struct Bf16Piece {
  const Bf16* k = nullptr;  // [tokens, head_dim], rows k_stride elements apart
  const Bf16* v = nullptr;
  int64_t stride = 0;
  int tokens = 0;
  int64_t first_position = 0;
  const Bf16* next_k = nullptr;  // K of the piece after this one, at the same stride, or null
};

// Elements [begin, end) of rows to prefetch. Pages lie at scattered addresses, so the hardware
// prefetcher starts again in each of them. Prefetching one piece ahead keeps the memory busy; it is
// done in slices because a core has about twenty outstanding misses.
struct PrefetchSlice {
  const Bf16* rows = nullptr;  // or null: no prefetch
  int begin = 0;
  int end = 0;
};

// Prefetches the slice of one row. The function must be inlined: GCC drops calls to functions that
// do nothing but prefetch.
template <typename V>
[[gnu::always_inline]] inline void PrefetchRow(const PrefetchSlice& slice, int64_t offset) {
  constexpr int kLineElements = 32;
  if (slice.rows == nullptr) return;
  for (int i = slice.begin; i < slice.end; i += kLineElements) {
    __builtin_prefetch(slice.rows + offset + i);
  }
}

// Computes the raw scores of kRows rows from `row` for four tokens from `token`.
template <typename V, int kRows>
void Bf16ScoreBlock(const Bf16Piece& piece, int dim, const AttendScratch& scratch, int row,
                    int token) {
  typename V::F sum[kRows][4];
  for (int n = 0; n < kRows; ++n) {
    for (int t = 0; t < 4; ++t) sum[n][t] = V::Set(0.0f);
  }
  const Bf16* k[4];
  for (int t = 0; t < 4; ++t) {
    // Beyond the end the last token is read again; those scores are masked afterwards.
    const int clamped = token + t < piece.tokens ? token + t : piece.tokens - 1;
    k[t] = piece.k + clamped * piece.stride;
  }
  const typename V::QueryElement* q = V::QueryOf(scratch.q + row * dim, scratch.q_bf16 + row * dim);
  for (int i = 0; i < dim; i += V::kKeyChannels) {
    typename V::Key key[4];
    for (int t = 0; t < 4; ++t) key[t] = V::LoadKey(k[t] + i);
    for (int n = 0; n < kRows; ++n) {
      for (int t = 0; t < 4; ++t) sum[n][t] = V::DotKey(sum[n][t], key[t], q + n * dim + i);
    }
  }
  for (int n = 0; n < kRows; ++n) {
    V::ReduceAdd4(sum[n][0], sum[n][1], sum[n][2], sum[n][3],
                  scratch.scores + (row + n) * scratch.score_stride + token);
  }
}

// Computes the raw scores of rows [begin, end). Scores beyond the piece's tokens, up to a multiple
// of 4, are undefined and have to be masked.
template <typename V>
void ScoreBf16Keys(const Bf16Piece& piece, int dim, const AttendScratch& scratch, int begin,
                   int end) {
  for (int token = 0; token < piece.tokens; token += 4) {
    const int last = token + 4 < piece.tokens ? token + 4 : piece.tokens;
    for (int t = token; t < last; ++t) PrefetchRow<V>({piece.v, 0, dim}, t * piece.stride);
    ForRowBlocks<V::kBf16ScoreRows>(begin, end, [&](auto rows, int row) {
      Bf16ScoreBlock<V, rows>(piece, dim, scratch, row, token);
    });
  }
}

// Adds kRows rows' weighted values to kVectors vectors of channels from channel `first`. Prefetches
// the rows at `next` meanwhile, unless it is null.
template <typename V, int kRows, int kVectors>
void Bf16ValueBlock(const Bf16Piece& piece, int dim, const AttendScratch& scratch, int row,
                    int first, const PrefetchSlice& next) {
  typename V::F sum[kRows][kVectors];
  for (int n = 0; n < kRows; ++n) {
    const typename V::F rescale = V::Set(scratch.rescale[row + n]);
    for (int v = 0; v < kVectors; ++v) {
      sum[n][v] =
          V::Mul(V::Load(scratch.bf16.out + (row + n) * dim + first + v * V::kLanes), rescale);
    }
  }
  const float* p = scratch.scores + row * scratch.score_stride;
  const Bf16* values = piece.v + first;
  for (int t = 0; t < piece.tokens; ++t) {
    PrefetchRow<V>(next, t * piece.stride);
    typename V::F value[kVectors];
    for (int v = 0; v < kVectors; ++v) {
      value[v] = V::LoadBf16(values + t * piece.stride + v * V::kLanes);
    }
    for (int n = 0; n < kRows; ++n) {
      const typename V::F weight = V::Set(p[n * scratch.score_stride + t]);
      for (int v = 0; v < kVectors; ++v) sum[n][v] = V::Fma(value[v], weight, sum[n][v]);
    }
  }
  for (int n = 0; n < kRows; ++n) {
    for (int v = 0; v < kVectors; ++v) {
      V::Store(scratch.bf16.out + (row + n) * dim + first + v * V::kLanes, sum[n][v]);
    }
  }
}

// Adds the weighted values of the piece to rows [begin, end), kVectors vectors of channels at a
// time, and prefetches an equal part of the next piece's K in each pass over the values.
template <typename V, int kVectors>
void AddBf16ValuesBy(const Bf16Piece& piece, int dim, const AttendScratch& scratch, int begin,
                     int end) {
  constexpr int kStep = kVectors * V::kLanes;
  const int passes = (end - begin + V::kBf16ValueRows - 1) / V::kBf16ValueRows * (dim / kStep);
  int pass = 0;
  ForRowBlocks<V::kBf16ValueRows>(begin, end, [&](auto rows, int row) {
    for (int i = 0; i < dim; i += kStep) {
      // The last blocks of rows may be smaller and more than planned; they have nothing left to
      // prefetch.
      const PrefetchSlice next = {pass < passes ? piece.next_k : nullptr, dim * pass / passes,
                                  dim * (pass + 1) / passes};
      Bf16ValueBlock<V, rows, kVectors>(piece, dim, scratch, row, i, next);
      ++pass;
    }
  });
}

// With few rows registers hold twice the channels, so V is read in longer contiguous pieces.
template <typename V>
void AddBf16Values(const Bf16Piece& piece, int dim, const AttendScratch& scratch, int begin,
                   int end) {
  constexpr int kLong = 2 * V::kBf16ValueVectors;
  if (2 * (end - begin) <= V::kBf16ValueRows && dim % (kLong * V::kLanes) == 0) {
    AddBf16ValuesBy<V, kLong>(piece, dim, scratch, begin, end);
  } else {
    AddBf16ValuesBy<V, V::kBf16ValueVectors>(piece, dim, scratch, begin, end);
  }
}

}  // namespace crumb::kernels
