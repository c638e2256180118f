// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>

#include "kernels/bf16.h"
#include "kernels/cpu/bf16_piece.h"
#include "kernels/cpu/int2_piece.h"
#include "kernels/cpu/rotate.h"

// Attention of one block of query rows over a whole sequence: it walks sink, history and recent
// window piece by piece and then joins the BF16 and the INT2 partial results. V is one of the Simd
// types.
//
// Every piece (a tile, or up to 64 BF16 rows) is scored, passes through the online softmax and is
// added to one of two partial results: BF16 in the model's basis, INT2 in the rotated one. At the
// end the INT2 result gets its minima and mean and is inverse-rotated once per row, and both are
// joined with the learned sink logit by their log-sum-exp. Nothing is allocated: AttendScratch is
// the caller's (docs/kernels/cpu.md, "Schedule").
namespace crumb::kernels {

template <typename V>
class RowAttention {
 public:
  RowAttention(const AttentionParams& params, const RowBlock& block, const AttendScratch& scratch)
      : params_(params), block_(block), s_(scratch), dim_(params.shape.head_dim) {
    const int64_t history = static_cast<int64_t>(params.pages) * params.shape.tokens;
    recent_position_ = params.sink_tokens + history;
    const int64_t total = recent_position_ + params.recent_tokens;
    first_query_position_ = total - params.q_tokens + block.token_begin;
    scale_ = params.scale != 0.0f ? params.scale : 1.0f / std::sqrt(static_cast<float>(dim_));
  }

  void Run() {
    const bool int2 = params_.history_format == PageFormat::kInt2 && params_.pages > 0;
    LoadQueries();
    Clear(s_.bf16);
    Clear(s_.int2);
    if (int2) PrepareInt2();
    WalkSink();
    for (int page = 0; page < params_.pages; ++page) {
      if (int2) {
        AddInt2Page(page);
      } else {
        AddBf16Page(page);
      }
    }
    WalkRecent();
    if (int2) FinishInt2();
    for (int row = 0; row < block_.rows(); ++row) StoreRow(row);
  }

 private:
  static constexpr float kNegativeInfinity = -std::numeric_limits<float>::infinity();

  struct Range {
    int begin = 0;
    int end = 0;
  };

  int QueryHead(int row) const { return block_.kv_head * block_.heads + row % block_.heads; }
  int QueryToken(int row) const { return block_.token_begin + row / block_.heads; }
  // A row attends positions [FirstPosition, LastPosition].
  int64_t LastPosition(int row) const { return first_query_position_ + row / block_.heads; }
  int64_t FirstPosition(int row) const {
    if (params_.window <= 0) return 0;
    const int64_t first = LastPosition(row) - params_.window + 1;
    return first > 0 ? first : 0;
  }

  // Returns the rows that attend any of `tokens` positions from `first`. They are a contiguous
  // range, because both bounds of the attended positions grow with the row.
  Range ActiveRows(int64_t first, int tokens) const {
    Range rows{0, block_.rows()};
    while (rows.begin < rows.end && LastPosition(rows.begin) < first) ++rows.begin;
    while (rows.end > rows.begin && FirstPosition(rows.end - 1) >= first + tokens) --rows.end;
    return rows;
  }

  void LoadQueries() {
    for (int row = 0; row < block_.rows(); ++row) {
      const int64_t from =
          (static_cast<int64_t>(QueryToken(row)) * params_.q_heads + QueryHead(row)) * dim_;
      for (int i = 0; i < dim_; ++i) {
        s_.q_bf16[row * dim_ + i] = params_.q[from + i];
        s_.q[row * dim_ + i] = Bf16ToFloat(params_.q[from + i]);
      }
    }
  }

  void Clear(const PartialSoftmax& partial) {
    for (int row = 0; row < block_.rows(); ++row) {
      partial.running_max[row] = kNegativeInfinity;
      partial.sum[row] = 0.0f;
    }
    for (int i = 0; i < block_.rows() * dim_; ++i) partial.out[i] = 0.0f;
  }

  void PrepareInt2() {
    const int rows = block_.rows(), groups = params_.shape.groups();
    for (int i = 0; i < rows * groups; ++i) s_.minimum_sum[i] = 0.0f;
    if (params_.rotation_k != nullptr) {
      RotateRows<V>(s_.q, rows, dim_, HeadMatrix(params_.rotation_k), s_.q_rotated);
    } else {
      for (int i = 0; i < rows * dim_; ++i) s_.q_rotated[i] = s_.q[i];
    }
    for (int row = 0; row < rows; ++row) PrepareQueryRow<V>(params_.shape, s_, row);
  }

  const float* HeadMatrix(const float* matrices) const {
    return matrices + static_cast<int64_t>(block_.kv_head) * dim_ * dim_;
  }

  void WalkSink() {
    const int64_t head = block_.kv_head * params_.sink_head_stride;
    for (int t = 0; t < params_.sink_tokens; t += kBf16PieceTokens) {
      const int64_t at = head + t * params_.sink_token_stride;
      AddBf16({params_.sink_k + at, params_.sink_v + at, params_.sink_token_stride,
               PieceTokens(params_.sink_tokens - t), t});
    }
  }

  void WalkRecent() {
    const int64_t head = block_.kv_head * params_.recent_head_stride;
    for (int t = 0; t < params_.recent_tokens;) {
      const int slot = (params_.recent_begin + t) % params_.recent_capacity;
      const int until_wrap = params_.recent_capacity - slot;
      const int left = params_.recent_tokens - t;
      const int tokens = PieceTokens(left < until_wrap ? left : until_wrap);
      const int64_t at = head + slot * params_.recent_token_stride;
      AddBf16({params_.recent_k + at, params_.recent_v + at, params_.recent_token_stride, tokens,
               recent_position_ + t});
      t += tokens;
    }
  }

  static int PieceTokens(int left) { return left < kBf16PieceTokens ? left : kBf16PieceTokens; }

  const uint8_t* Tile(int page) const {
    return reinterpret_cast<const uint8_t*>(params_.page_address[page]) +
           block_.kv_head * params_.page_head_stride;
  }

  void AddBf16Page(int page) {
    const Bf16* k = reinterpret_cast<const Bf16*>(Tile(page));
    const Bf16* v = k + params_.shape.tokens * dim_;
    const Bf16* next =
        page + 1 < params_.pages ? reinterpret_cast<const Bf16*>(Tile(page + 1)) : nullptr;
    for (int t = 0; t < params_.shape.tokens; t += kBf16PieceTokens) {
      const int tokens = PieceTokens(params_.shape.tokens - t);
      const bool last = t + tokens == params_.shape.tokens;
      AddBf16({k + t * dim_, v + t * dim_, dim_, tokens, PagePosition(page) + t,
               last ? next : k + (t + tokens) * dim_});
    }
  }

  int64_t PagePosition(int page) const {
    return params_.sink_tokens + static_cast<int64_t>(page) * params_.shape.tokens;
  }

  void AddBf16(const Bf16Piece& piece) {
    const Range rows = ActiveRows(piece.first_position, piece.tokens);
    if (rows.begin == rows.end) return;
    ScoreBf16Keys<V>(piece, dim_, s_, rows.begin, rows.end);
    const int padded = (piece.tokens + 15) / 16 * 16;
    const LogitMap map{scale_, params_.soft_cap, 0.0f, 0.0f};
    for (int row = rows.begin; row < rows.end; ++row) {
      float* scores = s_.scores + row * s_.score_stride;
      for (int t = piece.tokens; t < padded; ++t) scores[t] = 0.0f;
      MapLogits<V>(map, padded, scores);
      for (int t = piece.tokens; t < padded; ++t) scores[t] = kNegativeInfinity;
      MaskPositions(row, piece.first_position, piece.tokens, [](int i) { return i; });
      s_.rescale[row] = AddToSoftmax<V>(s_.bf16, row, padded, scores);
    }
    AddBf16Values<V>(piece, dim_, s_, rows.begin, rows.end);
  }

  // Sets the logits of positions that `row` does not attend to -infinity. lane_of(i) is the index
  // of the i-th token's logit.
  template <typename LaneOf>
  void MaskPositions(int row, int64_t first, int tokens, LaneOf lane_of) {
    const int64_t begin = FirstPosition(row) - first, end = LastPosition(row) + 1 - first;
    if (begin <= 0 && end >= tokens) return;
    for (int t = 0; t < tokens; ++t) {
      if (t < begin || t >= end) s_.scores[row * s_.score_stride + lane_of(t)] = kNegativeInfinity;
    }
  }

  void AddInt2Page(int page) {
    const TileShape& shape = params_.shape;
    const Range rows = ActiveRows(PagePosition(page), shape.tokens);
    if (rows.begin == rows.end) return;
    const uint8_t* tile = Tile(page);
    const uint8_t* next = page + 1 < params_.pages ? Tile(page + 1) : nullptr;
    PrefetchQuarter(next, 0);
    UnpackCodes<V>(shape, tile, s_);
    PrefetchQuarter(next, 1);
    UnpackMeta<V>(shape, tile, s_);
    ScoreRows<V>(shape, s_, rows.begin, rows.end);
    PrefetchQuarter(next, 2);
    for (int row = rows.begin; row < rows.end; ++row) {
      float* scores = s_.scores + row * s_.score_stride;
      MapLogits<V>(Int2LogitMap(row, page), shape.tokens, scores);
      MaskPositions(row, PagePosition(page), shape.tokens,
                    [](int i) { return i / 16 * 16 + 2 * (i % 8) + i % 16 / 8; });
      s_.rescale[row] = AddToSoftmax<V>(s_.int2, row, shape.tokens, scores);
      PrepareWeights<V>(shape, s_, row);
    }
    PrefetchQuarter(next, 3);
    ValueRows<V>(shape, s_, rows.begin, rows.end);
  }

  // Prefetches a quarter of the next tile while this one is computed, because tiles lie at
  // scattered addresses. A core has about twenty outstanding misses and stalls beyond them, hence
  // quarters. The function must be inlined: GCC drops calls to functions that do nothing but
  // prefetch.
  [[gnu::always_inline]] void PrefetchQuarter(const uint8_t* tile, int quarter) const {
    if (tile == nullptr) return;
    const int64_t bytes = static_cast<int64_t>(params_.shape.int2_bytes()) / 4;
    for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(tile + quarter * bytes + i);
  }

  LogitMap Int2LogitMap(int row, int page) const {
    LogitMap map{scale_, params_.soft_cap, 0.0f, 0.0f};
    if (params_.offset != nullptr) {
      const int wanted = page / params_.pages_per_position_block;
      const int last = params_.position_blocks - 1;
      const int64_t head = static_cast<int64_t>(QueryToken(row)) * params_.q_heads + QueryHead(row);
      map.offset = params_.offset[head * params_.position_blocks + (wanted < last ? wanted : last)];
    }
    if (params_.shift != nullptr) map.shift = params_.shift[QueryHead(row)];
    return map;
  }

  // Orders the INT2 sums by channel, adds minima and mean and inverse-rotates them. The result
  // replaces q_rotated.
  void FinishInt2() {
    const int rows = block_.rows();
    float* ordered = params_.rotation_v == nullptr ? s_.q_rotated : s_.q;
    for (int row = 0; row < rows; ++row) OrderRow(row, ordered + row * dim_);
    if (params_.rotation_v == nullptr) return;
    InverseRotateRows<V>(ordered, rows, dim_, HeadMatrix(params_.rotation_v), s_.q_rotated);
  }

  void OrderRow(int row, float* ordered) const {
    const int groups = params_.shape.groups();
    for (int slot = 0; slot < dim_; ++slot) {
      const int half = slot % 2, r = slot / 2 % 8, q = slot / 16 % 4, step = slot / 64;
      const int channel = 64 * step + 32 * half + 8 * q + r;
      ordered[channel] = s_.int2.out[row * dim_ + slot] +
                         s_.minimum_sum[row * groups + channel / params_.shape.group_size];
    }
    if (params_.mean_v == nullptr) return;
    const float* mean = params_.mean_v + block_.kv_head * dim_;
    for (int i = 0; i < dim_; ++i) ordered[i] += s_.int2.sum[row] * mean[i];
  }

  // Joins the two partial results and the learned sink logit of one row and stores its output.
  void StoreRow(int row) {
    const int64_t index = static_cast<int64_t>(QueryToken(row)) * params_.q_heads + QueryHead(row);
    const float sink = params_.sink_logit == nullptr ? kNegativeInfinity
                                                     : params_.sink_logit[QueryHead(row)] * kLog2E;
    float maximum = s_.bf16.running_max[row];
    if (s_.int2.running_max[row] > maximum) maximum = s_.int2.running_max[row];
    if (sink > maximum) maximum = sink;
    float* out = params_.out + index * dim_;
    if (maximum == kNegativeInfinity) {
      for (int i = 0; i < dim_; ++i) out[i] = 0.0f;
      if (params_.lse != nullptr) params_.lse[index] = kNegativeInfinity;
      return;
    }
    const float exact = std::exp2(s_.bf16.running_max[row] - maximum);
    const float quantized = std::exp2(s_.int2.running_max[row] - maximum);
    const float sum =
        exact * s_.bf16.sum[row] + quantized * s_.int2.sum[row] + std::exp2(sink - maximum);
    const float* int2_out = s_.q_rotated + row * dim_;
    const bool has_int2 = s_.int2.sum[row] > 0.0f;
    for (int i = 0; i < dim_; ++i) {
      float value = exact * s_.bf16.out[row * dim_ + i];
      if (has_int2) value += quantized * int2_out[i];
      out[i] = value / sum;
    }
    if (params_.lse != nullptr) params_.lse[index] = (maximum + std::log2(sum)) / kLog2E;
  }

  const AttentionParams& params_;
  const RowBlock& block_;
  const AttendScratch& s_;
  const int dim_;
  int64_t recent_position_ = 0;
  int64_t first_query_position_ = 0;
  float scale_ = 0.0f;
};

template <typename V>
void AttendRows(const AttentionParams& params, const RowBlock& block,
                const AttendScratch& scratch) {
  RowAttention<V>(params, block, scratch).Run();
}

}  // namespace crumb::kernels
