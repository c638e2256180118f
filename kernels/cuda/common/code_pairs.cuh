// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

// Codes as operands of fp16 products: masked out of a tile's words, no arithmetic per element.
namespace crumb::kernels::cuda {

// A code pair masked out of a word is code * 2^(shift - 24) in fp16, a subnormal.
__host__ __device__ constexpr int CodeShift(int pair) {
  return pair < 5 ? 2 * pair : 2 * (pair - 5);
}
__device__ __forceinline__ uint32_t CodePair(uint32_t word, int pair) {
  return (pair < 5 ? word : word >> 10) & (0x00030003u << CodeShift(pair));
}

__device__ __forceinline__ float PowerOfTwo(int exponent) {
  return __int_as_float((127 + exponent) << 23);
}

}  // namespace crumb::kernels::cuda
