// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

// How kernels read pages: 2-bit codes as MMA operands, and the numbers of BF16 tokens.
namespace crumb::kernels::cuda {

// 2-bit codes as operands of fp16 MMAs. Two codes that lie 16 bits apart in a word of a tile are
// masked out together and are then a half2, without arithmetic per element.
//
// A code pair that was masked out of a word is code * 2^(shift - 24) in fp16, a subnormal number.
// Callers divide the power of two out of the other operand or of the result.
__host__ __device__ constexpr int CodeShift(int pair) {
  return pair < 5 ? 2 * pair : 2 * (pair - 5);
}
__device__ __forceinline__ uint32_t CodePair(uint32_t word, int pair) {
  return (pair < 5 ? word : word >> 10) & (0x00030003u << CodeShift(pair));
}

__device__ __forceinline__ float PowerOfTwo(int exponent) {
  return __int_as_float((127 + exponent) << 23);
}

// Tokens of a page.
inline constexpr int kPageRows = 64;

// Returns the number of a sequence's BF16 history pages. `lengths` are decode's or prefill's.
template <class Lengths>
__device__ __forceinline__ int Bf16Pages(const Lengths& lengths, int sequence) {
  return lengths.bf16_pages == nullptr ? 0 : lengths.bf16_pages[sequence];
}

// Returns the number of a sequence's BF16 tokens behind its INT2 history: first those of BF16
// pages, then recent ones.
template <class Lengths>
__device__ __forceinline__ int WindowTokens(const Lengths& lengths, int sequence) {
  return kPageRows * Bf16Pages(lengths, sequence) + lengths.recent_tokens[sequence];
}

}  // namespace crumb::kernels::cuda
