// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "kernels/attention.h"

// Scratch memory of attention: the state of one block of query rows while it walks the sequence. A
// query row is one query token of one query head that reads the KV head.
namespace crumb::kernels {

// Query rows that share every unpacked tile: the query heads of one KV head times several tokens.
inline constexpr int kRowsPerBlock = 64;
// Tokens of the largest piece in which BF16 rows are attended.
inline constexpr int kBf16PieceTokens = 64;

// Query tokens [token_begin, token_begin + tokens) of one KV head.
struct RowBlock {
  int kv_head = 0;
  int heads = 1;  // query heads per KV head
  int token_begin = 0;
  int tokens = 1;
  int rows() const { return heads * tokens; }
};

// A running softmax: the maximum in base 2, the sum of 2^(x - maximum), and the weighted sum of
// values.
struct PartialSoftmax {
  float* running_max = nullptr;  // [rows]
  float* sum = nullptr;          // [rows]
  float* out = nullptr;          // [rows, head_dim]
};

struct AttendScratch {
  // Queries.
  float* q = nullptr;          // [rows, head_dim] model's basis
  Bf16* q_bf16 = nullptr;      // [rows, head_dim] q as stored
  float* q_rotated = nullptr;  // [rows, head_dim] q R_K; at the end the INT2 output
  uint8_t* q_high = nullptr;   // [rows, quad_slots, 4] q' as 16-bit fixed point: upper bytes
  uint8_t* q_low = nullptr;    // [rows, quad_slots, 4] lower bytes, signed
  float* q_unit = nullptr;     // [rows] value of one fixed-point step
  float* q_sum = nullptr;      // [rows, groups] sum of a group's fixed-point q', as a value

  // State of one piece of the sequence.
  float* scores = nullptr;     // [rows, score_stride] logits in base 2, then probabilities
  float* rescale = nullptr;    // [rows] factor of sums that are relative to the old maximum
  uint8_t* p_high = nullptr;   // [rows, weight_groups, tokens / 4, 2, 4] p * scale, fixed point
  uint8_t* p_low = nullptr;    // [rows, weight_groups, tokens / 4, 2, 4] lower bytes, signed
  float* p_unit = nullptr;     // [rows, weight_groups] value of one fixed-point step
  uint8_t* k_panel = nullptr;  // [tokens / 16, head_dim / 4, 16, 4] one code per byte
  uint8_t* v_panel = nullptr;  // [tokens / 4, head_dim, 4]
  uint32_t* units = nullptr;   // [8, 16] words of one 16-token group between two steps of unpacking
  uint32_t* meta = nullptr;    // [2, groups, tokens] halves of K, then V, in lane order
  float* k_scale = nullptr;    // [groups, tokens] in lane order, as the following arrays
  float* k_minimum = nullptr;
  float* v_scale = nullptr;
  float* v_minimum = nullptr;

  // Partial results.
  PartialSoftmax bf16;
  PartialSoftmax int2;           // out is in the order of panel slots
  float* minimum_sum = nullptr;  // [rows, groups] sum of p * minimum of INT2 values

  int score_stride = 0;
  int quad_slots = 0;
  int weight_groups = 0;
};

// Returns the query tokens per block for these parameters.
int TokensPerBlock(const AttentionParams& params);

// Lays the arrays out from `base`, which is 64-byte aligned or null to learn the size. Returns the
// bytes used.
size_t LayOutScratch(const AttentionParams& params, void* base, AttendScratch* scratch);

// Calls fn(std::integral_constant<int, n>, row) for rows [begin, end) in blocks of n = kRows as
// long as they fit, then of half as many, down to one, so that each block size is compiled by
// itself. REQUIRES: kRows is a power of two.
template <int kRows, typename Fn>
[[gnu::always_inline]] inline void ForRowBlocks(int begin, int end, const Fn& fn) {
  int row = begin;
  for (; row + kRows <= end; row += kRows) fn(std::integral_constant<int, kRows>(), row);
  if constexpr (kRows > 1) ForRowBlocks<kRows / 2>(row, end, fn);
}

}  // namespace crumb::kernels
