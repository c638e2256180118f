// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "kernels/cpu/panel.h"
#include "kernels/cpu/scratch.h"
#include "kernels/cpu/softmax.h"

// Attention of a block of rows over one INT2 tile. Scores and values are integer dot products of
// codes with 16-bit fixed-point operands; scale and minimum are applied once per token and group.
namespace crumb::kernels {

// Largest magnitude of a fixed-point operand of two signed bytes: 256 * 127 + 127.
inline constexpr float kFixedPointMax = 32639.0f;

// Returns the channel of byte `byte` of K quad `quad`.
template <typename V>
int ChannelOfQuad(int quad, int byte) {
  const int q = quad % 4, c = quad / 4 % 4, step = quad / 16;
  return 64 * step + 32 * (byte % 2) + 8 * q + 2 * c + byte / 2;
}

// Converts one rotated query row to fixed point in the order of the K panel: sets q_high, q_low,
// q_unit and q_sum of `row`.
template <typename V>
void PrepareQueryRow(const TileShape& shape, const AttendScratch& scratch, int row) {
  const int d = shape.head_dim;
  const float* q = scratch.q_rotated + row * d;
  typename V::F highest = V::Set(0.0f);
  for (int i = 0; i < d; i += V::kLanes) highest = V::Max(highest, V::Abs(V::Load(q + i)));
  const float largest = V::ReduceMax(highest);
  const float unit = largest / kFixedPointMax;
  const float steps = unit > 0.0f ? kFixedPointMax / largest : 0.0f;
  int32_t fixed[256];
  for (int i = 0; i < d; i += V::kLanes) {
    V::StoreI(fixed + i, V::Round(V::Mul(V::Load(q + i), V::Set(steps))));
  }
  scratch.q_unit[row] = unit;
  const int slots = scratch.quad_slots / shape.groups();
  for (int y = 0; y < shape.groups(); ++y) {
    uint8_t* high = scratch.q_high + 4 * (row * scratch.quad_slots + y * slots);
    uint8_t* low = scratch.q_low + 4 * (row * scratch.quad_slots + y * slots);
    const int first_quad = y * shape.group_size / 64 * 16;
    int32_t sum = 0;
    for (int i = 0; i < 4 * slots; ++i) {
      const int channel = ChannelOfQuad<V>(first_quad + i / 4, i % 4);
      const int32_t x = channel / shape.group_size == y ? fixed[channel] : 0;
      const int32_t upper = (x + 128) >> 8;
      high[i] = static_cast<uint8_t>(upper);
      low[i] = static_cast<uint8_t>(x - 256 * upper);
      sum += x;
    }
    scratch.q_sum[row * shape.groups() + y] = unit * static_cast<float>(sum);
  }
}

// Computes the raw scores q'.z of kRows rows from `row` for kVectors vectors of tokens from vector
// `first`.
template <typename V, int kRows, int kVectors>
void ScoreBlock(const TileShape& shape, const AttendScratch& scratch, int row, int first) {
  constexpr int kPerGroup = 16 / V::kLanes;  // vectors per 16 tokens
  const int slots = scratch.quad_slots / shape.groups();
  const int quads = shape.head_dim / 4;
  typename V::F score[kRows][kVectors];
  for (int n = 0; n < kRows; ++n) {
    for (int v = 0; v < kVectors; ++v) score[n][v] = V::Set(0.0f);
  }
  for (int y = 0; y < shape.groups(); ++y) {
    const int first_quad = y * shape.group_size / 64 * 16;
    const uint8_t* codes[kVectors];
    for (int v = 0; v < kVectors; ++v) {
      const int vector = first + v;
      codes[v] = scratch.k_panel + 64 * (vector / kPerGroup * quads + first_quad) +
                 4 * V::kLanes * (vector % kPerGroup);
    }
    const uint8_t* high = scratch.q_high + 4 * (row * scratch.quad_slots + y * slots);
    const uint8_t* low = scratch.q_low + 4 * (row * scratch.quad_slots + y * slots);
    typename V::Acc upper[kRows][kVectors], lower[kRows][kVectors];
    for (int n = 0; n < kRows; ++n) {
      for (int v = 0; v < kVectors; ++v) upper[n][v] = lower[n][v] = V::ZeroAcc();
    }
    for (int x = 0; x < slots; ++x) {
      typename V::I code[kVectors];
      for (int v = 0; v < kVectors; ++v) code[v] = V::LoadI(codes[v] + 64 * x);
      for (int n = 0; n < kRows; ++n) {
        const typename V::I h = V::Broadcast32(high + 4 * (n * scratch.quad_slots + x));
        const typename V::I l = V::Broadcast32(low + 4 * (n * scratch.quad_slots + x));
        for (int v = 0; v < kVectors; ++v) {
          upper[n][v] = V::Dot(upper[n][v], code[v], h);
          lower[n][v] = V::Dot(lower[n][v], code[v], l);
        }
      }
    }
    for (int n = 0; n < kRows; ++n) {
      const typename V::F unit = V::Set(scratch.q_unit[row + n]);
      const typename V::F sum = V::Set(scratch.q_sum[(row + n) * shape.groups() + y]);
      for (int v = 0; v < kVectors; ++v) {
        const int at = y * shape.tokens + (first + v) * V::kLanes;
        const typename V::F dot = V::Mul(V::ToFloat(V::Widen(upper[n][v], lower[n][v])), unit);
        const typename V::F minimum = V::Mul(V::Load(scratch.k_minimum + at), sum);
        const typename V::F part = V::Fma(V::Load(scratch.k_scale + at), dot, minimum);
        score[n][v] = V::Add(score[n][v], part);
      }
    }
  }
  for (int n = 0; n < kRows; ++n) {
    for (int v = 0; v < kVectors; ++v) {
      V::Store(scratch.scores + (row + n) * scratch.score_stride + (first + v) * V::kLanes,
               score[n][v]);
    }
  }
}

// Computes the raw scores of rows [begin, end) for a whole tile. With few rows more vectors of
// tokens are processed at a time, so that enough independent sums are in flight.
template <typename V>
void ScoreRows(const TileShape& shape, const AttendScratch& scratch, int begin, int end) {
  const int vectors = shape.tokens / V::kLanes;
  ForRowBlocks<V::kScoreRows>(begin, end, [&](auto rows, int row) {
    constexpr int kRows = rows;
    constexpr int kMore = kRows < V::kScoreRows ? 2 * V::kScoreVectors : V::kScoreVectors;
    int v = 0;
    for (; v + kMore <= vectors; v += kMore) {
      ScoreBlock<V, kRows, kMore>(shape, scratch, row, v);
    }
    for (; v < vectors; v += V::kScoreVectors) {
      ScoreBlock<V, kRows, V::kScoreVectors>(shape, scratch, row, v);
    }
  });
}

// Converts p * v_scale of one row to fixed point for the value kernel and sums p * v_minimum.
template <typename V>
void PrepareWeights(const TileShape& shape, const AttendScratch& scratch, int row) {
  const int tokens = shape.tokens;
  const float* p = scratch.scores + row * scratch.score_stride;
  const int groups_per_weight = shape.groups() / scratch.weight_groups;
  for (int y = 0; y < shape.groups(); ++y) {
    typename V::F sum = V::Set(0.0f);
    for (int t = 0; t < tokens; t += V::kLanes) {
      sum = V::Fma(V::Load(p + t), V::Load(scratch.v_minimum + y * tokens + t), sum);
    }
    float* total = scratch.minimum_sum + row * shape.groups() + y;
    *total = *total * scratch.rescale[row] + V::ReduceAdd(sum);
  }
  for (int w = 0; w < scratch.weight_groups; ++w) {
    const float* first = scratch.v_scale + w * groups_per_weight * tokens;
    const float* second = first + (groups_per_weight - 1) * tokens;
    typename V::F highest = V::Set(0.0f);
    for (int t = 0; t < tokens; t += V::kLanes) {
      const typename V::F scale = V::Max(V::Abs(V::Load(first + t)), V::Abs(V::Load(second + t)));
      highest = V::Max(highest, V::Mul(V::Load(p + t), scale));
    }
    const float largest = V::ReduceMax(highest);
    const float unit = largest / kFixedPointMax;
    const typename V::F steps = V::Set(unit > 0.0f ? kFixedPointMax / largest : 0.0f);
    scratch.p_unit[row * scratch.weight_groups + w] = unit;
    const int64_t at = static_cast<int64_t>(row * scratch.weight_groups + w) * tokens * 2;
    for (int t = 0; t < tokens; t += V::kLanes) {
      const typename V::F x = V::Mul(V::Load(p + t), steps);
      const typename V::I a = V::Round(V::Mul(x, V::Load(first + t)));
      const typename V::I b = V::Round(V::Mul(x, V::Load(second + t)));
      // The low byte is signed, so the upper one is rounded, not truncated.
      const typename V::I half = V::SetI(128);
      V::StoreWeights(scratch.p_high + at + 2 * t,
                      V::template ShiftRightSigned<8>(V::AddI(a, half)),
                      V::template ShiftRightSigned<8>(V::AddI(b, half)));
      V::StoreWeights(scratch.p_low + at + 2 * t, a, b);
    }
  }
}

// Adds kRows rows' weighted values to kVectors vectors of channel slots from vector `first`.
template <typename V, int kRows, int kVectors>
void ValueBlock(const TileShape& shape, const AttendScratch& scratch, int row, int first) {
  const int d = shape.head_dim, quads = shape.tokens / 4;
  const int wide = shape.group_size > 64 ? shape.group_size : 64;  // channels per weight group
  const int w = first * V::kLanes / wide;
  const uint8_t* codes = scratch.v_panel + 4 * first * V::kLanes;
  const int64_t row_bytes = static_cast<int64_t>(scratch.weight_groups) * shape.tokens * 2;
  const uint8_t* high = scratch.p_high + row * row_bytes + w * shape.tokens * 2;
  const uint8_t* low = scratch.p_low + row * row_bytes + w * shape.tokens * 2;
  typename V::Acc upper[kRows][kVectors], lower[kRows][kVectors];
  for (int n = 0; n < kRows; ++n) {
    for (int v = 0; v < kVectors; ++v) upper[n][v] = lower[n][v] = V::ZeroAcc();
  }
  for (int x = 0; x < quads; ++x) {
    typename V::I code[kVectors];
    for (int v = 0; v < kVectors; ++v) {
      code[v] = V::LoadI(codes + 4 * (static_cast<int64_t>(x) * d + v * V::kLanes));
    }
    for (int n = 0; n < kRows; ++n) {
      const typename V::I h = V::Broadcast64(high + n * row_bytes + 8 * x);
      const typename V::I l = V::Broadcast64(low + n * row_bytes + 8 * x);
      for (int v = 0; v < kVectors; ++v) {
        upper[n][v] = V::Dot(upper[n][v], code[v], h);
        lower[n][v] = V::Dot(lower[n][v], code[v], l);
      }
    }
  }
  for (int n = 0; n < kRows; ++n) {
    const typename V::F rescale = V::Set(scratch.rescale[row + n]);
    const typename V::F unit = V::Set(scratch.p_unit[(row + n) * scratch.weight_groups + w]);
    for (int v = 0; v < kVectors; ++v) {
      float* out = scratch.int2.out + (row + n) * d + (first + v) * V::kLanes;
      const typename V::F part = V::Mul(V::ToFloat(V::Widen(upper[n][v], lower[n][v])), unit);
      V::Store(out, V::Fma(V::Load(out), rescale, part));
    }
  }
}

// Adds the weighted values of a whole tile to rows [begin, end).
template <typename V>
void ValueRows(const TileShape& shape, const AttendScratch& scratch, int begin, int end) {
  ForRowBlocks<V::kValueRows>(begin, end, [&](auto rows, int row) {
    for (int v = 0; v < shape.head_dim / V::kLanes; v += V::kValueVectors) {
      ValueBlock<V, rows, V::kValueVectors>(shape, scratch, row, v);
    }
  });
}

}  // namespace crumb::kernels
